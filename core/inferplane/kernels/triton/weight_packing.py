"""Weights as the matrix kernels read them: entries in their own width, contiguous rows, scales in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from inferplane.errors import KernelError
from inferplane.types import Packing, QTensor

PLAIN, FP8, INT8, INT4 = 0, 1, 2, 3
GROUPS = (32, 64, 128)
"""Columns that may share a scale where a row has several."""
DEPTH = 128
"""Columns per loop iteration where a row has one scale; also the columns that are packed together in an INT4 row."""


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight `[N, K]`, or a stack of experts' weights `[E, N, K]`.

    Args:
        data: `[..., N, K]`; FP8 as its bits (uint8); of INT4 two entries a byte, offset by 8: byte j of a span of
            `depth` columns holds columns j (low) and `depth / 2 + j`.
        scale: float32 `[..., ceil(N / rows), groups]`, or None for plain weights.
        zero: as `scale`, or None.
        kind: PLAIN, FP8, INT8 or INT4.
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
        """Columns per loop iteration of a product: those that share a scale, or `DEPTH` where whole rows do."""
        return self.group or DEPTH

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
    group = 0 if weight.scale.shape[-1] == 1 and group not in GROUPS else group
    if group and group not in GROUPS:
        raise KernelError(
            f"Groups of {group} columns.", there_is=f"groups of {', '.join(map(str, GROUPS))}, whole rows"
        )
    zero = None if weight.zero is None else weight.zero.float().contiguous()
    if weight.bits == 4:
        data, kind = _pack_int4(weight.data, group or DEPTH), INT4
    elif weight.data.dtype == torch.int8:
        data, kind = weight.data.contiguous(), INT8
    else:
        data, kind = weight.data.contiguous().view(torch.uint8), FP8
    return PackedWeight(data, weight.scale.float().contiguous(), zero, kind, rows, group, columns, weight.act_scale)


def _pack_int4(data: torch.Tensor, span: int) -> torch.Tensor:
    """INT4 entries plus 8, two per byte: byte j of every `span` columns holds columns j (low) and `span / 2 + j`."""
    spans = math.ceil(data.shape[-1] / span)
    offset = F.pad(data, (0, spans * span - data.shape[-1])).add(8).view(torch.uint8)
    low, high = offset.unflatten(-1, (spans, 2, span // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2).contiguous()


PACKING = Packing("triton.packed", pack, dense=True)
