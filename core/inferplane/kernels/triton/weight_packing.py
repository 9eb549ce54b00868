"""Weights as the matrix kernels read them: entries in their own width, contiguous rows, scales beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from inferplane.errors import KernelError
from inferplane.ops.formats import FORMATS
from inferplane.types import PackedStorage, Packing, QTensor, StoredWeight

PLAIN, FP8, INT8, INT4, MXFP4, NVFP4 = 0, 1, 2, 3, 4, 5
FP4 = {MXFP4: FORMATS["mxfp4"], NVFP4: FORMATS["nvfp4"]}
"""Kinds of entries of e2m1 -> dtype, bits and block of canonical ones."""
GROUPS = (32, 64, 128)
"""Columns that may share a scale where a row has several, but for NVFP4."""
DEPTH = 128
"""Columns per loop iteration where a row has one scale; also the columns that are packed together in an INT4 row."""


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight `[N, K]`, or a stack of experts' weights `[E, N, K]`.

    Args:
        data: `[..., N, K]`; FP8 as its bits (uint8); of INT4, offset by 8, and of FP4, as its bits, two entries a
            byte: byte j of a span of `depth` columns holds columns j (low) and `depth / 2 + j`.
        scale: float32 `[..., ceil(N / rows), groups]`; of MXFP4 uint8, exponents plus 127, 255 for NaN; of NVFP4
            bfloat16 if that holds them exactly; None for plain weights.
        zero: as `scale`, or None.
        kind: PLAIN, FP8, INT8, INT4, MXFP4 or NVFP4.
        rows: rows that share a scale.
        group: columns that share a scale, 0 for the whole row.
        columns: K.
        act_scale: as of `QTensor`.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    kind: int
    rows: int
    group: int
    columns: int
    act_scale: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """Rows N of the weight, which are columns of the product."""
        return self.data.shape[-2]

    @property
    def depth(self) -> int:
        """Columns per loop iteration of a product: those that share a scale, of FP4 two such groups, one in each half
        of the bytes; `DEPTH` where whole rows share one.
        """
        return 2 * self.group if self.kind in FP4 else self.group or DEPTH

    @property
    def static_scale(self) -> torch.Tensor | None:
        """The fixed scale `[1]` that an FP8 checkpoint brings for the activations of this weight, or None."""
        return self.act_scale if self.kind == FP8 else None

    @property
    def nbytes(self) -> int:
        """Bytes of entries, scales and zero points together."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.zero) if t is not None)


def pack(weight: torch.Tensor | QTensor) -> PackedWeight:
    """Pack a weight that is in canonical form (rows as outputs): contiguous rows, FP8 as bits, two INT4 entries per
    byte, scales in float32. A plain weight that is contiguous is not copied.

    Raises:
        KernelError: columns share scales in groups other than `GROUPS`.
    """
    if isinstance(weight, torch.Tensor):
        return PackedWeight(weight.contiguous(), None, None, PLAIN, 1, 0, weight.shape[-1])
    columns, (rows, group) = weight.shape[-1], weight.block
    fp4 = next((kind for kind, form in FP4.items() if (weight.data.dtype, weight.bits, weight.block) == form), None)
    if fp4 is not None and weight.zero is None:
        scale = _find_exponents(weight.scale) if fp4 == MXFP4 else _narrow(2 * weight.scale)
        packed = _pack_halves(_find_e2m1_bits(weight.data), 2 * group)
        return PackedWeight(packed, scale, None, fp4, rows, group, columns, weight.act_scale)
    group = 0 if weight.scale.shape[-1] == 1 and group not in GROUPS else group
    if group and group not in GROUPS:
        raise KernelError(
            f"Groups of {group} columns.", there_is=f"groups of {', '.join(map(str, GROUPS))}, whole rows"
        )
    zero = None if weight.zero is None else weight.zero.float().contiguous()
    if weight.bits == 4:
        data, kind = _pack_halves(weight.data.add(8).view(torch.uint8), group or DEPTH, 8), INT4
    elif weight.data.dtype == torch.int8:
        data, kind = weight.data.contiguous(), INT8
    else:
        data, kind = weight.data.contiguous().view(torch.uint8), FP8
    return PackedWeight(data, weight.scale.float().contiguous(), zero, kind, rows, group, columns, weight.act_scale)


def _pack_halves(entries: torch.Tensor, span: int, padding: int = 0) -> torch.Tensor:
    """Entries of 4 bits (uint8), two per byte: byte j of every `span` columns holds columns j (low) and `span / 2 + j`.
    The last span is filled up with `padding`.
    """
    spans = math.ceil(entries.shape[-1] / span)
    whole = F.pad(entries, (0, spans * span - entries.shape[-1]), value=padding)
    low, high = whole.unflatten(-1, (spans, 2, span // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2).contiguous()


def _find_e2m1_bits(data: torch.Tensor) -> torch.Tensor:
    """Bits (e2m1 with a sign) of canonical entries, which are twice the values of `MXFP4_VALUES`; uint8."""
    size = data.abs()
    code = size - sum((size > step).to(torch.int8) * by for step, by in ((4, 1), (6, 1), (8, 3)))
    return code.view(torch.uint8) | ((data < 0).to(torch.uint8) << 3)


def _find_exponents(scale: torch.Tensor) -> torch.Tensor:
    """Exponents plus 127 of the powers of two that are twice `scale`, since entries are half the canonical ones; uint8,
    255 for NaN.
    """
    exponent = torch.frexp(scale.float())[1] + 127  # a power of two is half of 2^exponent
    return torch.where(scale.isnan(), 255, exponent).to(torch.uint8).contiguous()


def _narrow(scale: torch.Tensor) -> torch.Tensor:
    """Scales in bfloat16 if all are the same numbers there: those of e4m3 times a power of two are."""
    narrow = scale.bfloat16()
    return (narrow if torch.equal(narrow.float().nan_to_num(), scale.nan_to_num()) else scale.float()).contiguous()


_TENSORS = ("data", "scale", "zero", "act_scale")
_FACTS = ("kind", "rows", "group", "columns")
_DTYPES = {PLAIN: None, FP8: torch.uint8, INT8: torch.int8, **dict.fromkeys((INT4, MXFP4, NVFP4), torch.uint8)}
VERSION = "1"
"""Of the layout of `PackedWeight`: grows with every change of what its bytes mean."""


def write(weight: PackedWeight) -> StoredWeight:
    """What a file has of a packed weight."""
    tensors = {name: part for name in _TENSORS if (part := getattr(weight, name)) is not None}
    return StoredWeight(tensors, {name: getattr(weight, name) for name in _FACTS})


def read(stored: StoredWeight, shape: tuple[int, ...]) -> PackedWeight:
    """The packed weight `[..., N, K]` of a file.

    Raises:
        KernelError: its sizes are not those of such a weight.
    """
    facts = dict(stored.facts)
    if set(facts) != set(_FACTS) or not all(type(value) is int for value in facts.values()):
        raise KernelError(f"A packed weight has facts {facts}.", there_is=f"integers {', '.join(_FACTS)}")
    found = PackedWeight(**{**dict.fromkeys(_TENSORS), **stored.tensors}, **facts)  # type: ignore[arg-type]
    if not _is_weight(found, shape):
        raise KernelError(f"What is stored as a packed weight of shape {shape} is none: {facts}.")
    return found


def _is_weight(w: PackedWeight, shape: tuple[int, ...]) -> bool:
    """Whether all sizes and dtypes are those that `pack` gives a weight of a shape."""
    if w.kind not in _DTYPES or w.group not in (0, 16, *GROUPS) or w.rows < 1 or w.columns != shape[-1]:
        return False
    if w.group != FP4[w.kind][2][1] if w.kind in FP4 else w.group == 16:
        return False
    halves = math.ceil(w.columns / w.depth) * w.depth // 2
    expected = (*shape[:-1], halves if w.kind == INT4 or w.kind in FP4 else w.columns)
    if tuple(w.data.shape) != expected or w.data.dtype is not (_DTYPES[w.kind] or w.data.dtype):
        return False
    if w.kind == PLAIN:
        return w.scale is None and w.zero is None
    scales = (*shape[:-2], math.ceil(shape[-2] / w.rows), math.ceil(w.columns / w.group) if w.group else 1)
    dtypes = {MXFP4: (torch.uint8,), NVFP4: (torch.bfloat16, torch.float32)}.get(w.kind, (torch.float32,))
    parts = [(w.scale, dtypes), *([] if w.zero is None else [(w.zero, (torch.float32,))])]
    return all(p is not None and tuple(p.shape) == scales and p.dtype in kinds for p, kinds in parts)


STORAGE = PackedStorage(VERSION, write, read)
PACKING = Packing("triton.packed", pack, dense=True, storage=STORAGE)
