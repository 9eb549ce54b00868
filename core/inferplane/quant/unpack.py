"""Unpacks integer weights with several entries per 32-bit word (GPTQ, AWQ, compressed-tensors) to int8 tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from inferplane.binding import TensorSource
from inferplane.errors import CheckpointError
from inferplane.quant.column_order import find_chunk_groups
from inferplane.types import Shard

WEIGHT = ".weight"
SCALE = ".weight_scale"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's position of eight consecutive entries in a word: the fifth entry follows the first."""


@dataclass(frozen=True)
class IntegerPacking:
    """How integers are packed in words of 32 bits.

    Args:
        method: "compressed-tensors", "gptq" or "awq": which tensors there are, and which dimension is packed.
        bits: bits per entry, 4 or 8.
        group: columns that share a scale; 0: the whole row.
        symmetric: the zero point is the middle of the range. Stored zero points of GPTQ are ignored, since its writers
            disagree about them; those of AWQ have to be the middle.
        less_one: stored zero points are 1 too small (GPTQ, except its format "gptq_v2").
        scale_repeats: how many times each scale is shown, for a format of narrower groups.
        expands: weights are shown dequantized (`expand`), because no format holds them: of scattered columns, or of 8
            bits with zero points.

    Source: the published layouts of GPTQ's and AWQ's checkpoints, and of compressed-tensors' "pack-quantized".
    """

    method: str
    bits: int
    group: int
    symmetric: bool = True
    less_one: bool = False
    scale_repeats: int = 1
    expands: bool = False

    @property
    def suffix(self) -> str:
        """Suffix of a module's name that gives its packed weight."""
        return ".weight_packed" if self.method == "compressed-tensors" else ".qweight"

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of a module's name that give every tensor of the packed weight and its scales."""
        if self.method == "compressed-tensors":
            return self.suffix, ".weight_shape", ".weight_zero_point", ".weight_g_idx"
        return self.suffix, ".scales", ".qzeros", ".g_idx"

    def view(self, source: TensorSource) -> UnpackedSource:
        """A view of a checkpoint with this packing in which weights are unpacked."""
        return UnpackedSource(source, self)


class UnpackedSource:
    """A `TensorSource` in which a module has its unpacked weight `module.weight`, int8 `[N, K]` minus zero points, and
    scales `module.weight_scale`, `[N, groups]`; all other tensors are unchanged.

    Args:
        source: the checkpoint.
        packed: how its integers are packed.
        includes: whether a module, by its name, is packed so; others stay as they are.

    Raises (by `read_into` and `shape`):
        CheckpointError: tensors are missing or do not fit each other; columns of a group are not adjacent.
    """

    def __init__(
        self, source: TensorSource, packed: IntegerPacking, includes: Callable[[str], bool] = lambda module: True
    ) -> None:
        self.source, self.packed, self._includes = source, packed, includes
        self._shapes: dict[str, tuple[int, int]] = {}

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        expands, hidden, shown = self.packed.expands, set[str](), list[str]()
        for name in self.source.names():
            module = name.removesuffix(self.packed.suffix)
            if module != name and self._includes(module):
                hidden |= {module + part for part in self.packed.parts} | ({module + SCALE} if expands else set())
                shown += [module + WEIGHT, *([module + SCALE] if self._transposed and not expands else [])]
        return [*shown, *(name for name in self.source.names() if name not in hidden)]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        if module := self._module(name, WEIGHT):
            return self._shape(module)
        if self._makes_scales and (module := self._module(name, SCALE)):
            if self.packed.expands:
                return None
            found = self.source.shape(self._scale_name(module))
            if found is None or len(found) != 2:
                return found
            n, groups = tuple(reversed(found)) if self._transposed else found
            return n, self._count_scales(module, groups)
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`."""
        if module := self._module(name, WEIGHT):
            return torch.float32 if self.packed.expands else torch.int8  # a product of integer and scale is not rounded
        if self._makes_scales and (module := self._module(name, SCALE)):
            return self.source.dtype(self._scale_name(module))
        return self.source.dtype(name)

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`."""
        if module := self._module(name, WEIGHT):
            values = self._expand(module) if self.packed.expands else self._values(module)
        elif (module := self._module(name, SCALE)) and (self._makes_scales or self._has_order(module)):
            values = self._read(self._scale_name(module), out.dtype)
            values = values.t() if self._transposed else values
            by_group = values.ndim == 2 and not self.packed.expands
            order = self._find_order(module, values.shape[1]) if by_group else None
            values = values if order is None else values[:, order]
            if self.packed.scale_repeats > 1:
                count = self._count_scales(module, values.shape[1])
                values = values.repeat_interleave(self.packed.scale_repeats, 1)[:, :count]
        else:
            return self.source.read_into(name, out, shard)
        if not shard.is_whole:
            first, last = shard.bounds(values.shape[shard.axis])
            values = values.narrow(shard.axis, first, last - first)
        out.view(values.shape).copy_(values)
        return None

    # -- one module

    @property
    def _transposed(self) -> bool:
        """Whether the stored dimension of inputs comes before that of outputs."""
        return self.packed.method != "compressed-tensors"

    @property
    def _makes_scales(self) -> bool:
        """Whether scales are shown in another form than they are stored in."""
        return self._transposed or self.packed.scale_repeats > 1 or self.packed.expands

    def _scale_name(self, module: str) -> str:
        return f"{module}.scales" if self._transposed else module + SCALE

    def _count_scales(self, module: str, groups: int) -> int:
        """Scales of a row that are shown where so many are stored: the last group of columns may be partial."""
        repeats = self.packed.scale_repeats
        if repeats == 1:
            return groups
        return min(groups * repeats, -(-self._shape(module)[1] // (self.packed.group // repeats)))

    def _module(self, name: str, suffix: str) -> str:
        """The module whose unpacked tensor has this name; empty if there is none."""
        module = name.removesuffix(suffix)
        if module == name or self.source.shape(module + self.packed.suffix) is None:
            return ""
        return module if self._includes(module) else ""

    def _shape(self, module: str) -> tuple[int, int]:
        """Outputs and inputs of a module's weight."""
        if module not in self._shapes:
            self._shapes[module] = self._find_shape(module)
        return self._shapes[module]

    def _find_shape(self, module: str) -> tuple[int, int]:
        name, each = module + self.packed.suffix, 32 // self.packed.bits
        have, kind = self.source.shape(name) or (), self.source.dtype(name)
        if len(have) != 2 or kind is not torch.int32:
            raise self._make_error(name, f"is {have} {kind}, not a matrix of int32")
        if self.packed.method == "gptq":
            return have[1], have[0] * each
        if self.packed.method == "awq":
            return have[1] * each, have[0]
        stated = f"{module}.weight_shape"
        if self.source.shape(stated) is None:
            return have[0], have[1] * each
        if self.source.shape(stated) != (2,):
            raise self._make_error(stated, f"has shape {self.source.shape(stated)}, not two numbers")
        n, k = self._read(stated, torch.int64).tolist()
        if n != have[0] or k < 1 or -(-k // each) != have[1]:
            raise self._make_error(stated, f"says {n} x {k}, and {name} has {have}")
        return n, k

    def _values(self, module: str) -> torch.Tensor:
        """int8 `[N, K]`: entries minus their zero points."""
        p, (n, k) = self.packed, self._shape(module)
        unsigned = self._read_entries(module, k)
        if p.symmetric:
            if p.method == "awq":
                self._check_middle(module, n, k)
            return (unsigned ^ 128).view(torch.int8) if p.bits == 8 else unsigned.contiguous().view(torch.int8) - 8
        zeros, width = self._zeros(module, n, k), p.group or k
        order = self._find_order(module, zeros.shape[1])
        zeros = zeros if order is None else zeros[:, order]
        values = unsigned.contiguous().view(torch.int8)  # of 4 bits
        for group, columns in enumerate(values.split(width, 1)):
            columns.sub_(zeros[:, group, None])
        return values

    def _read_entries(self, module: str, k: int) -> torch.Tensor:
        """uint8 `[N, K]`: entries as they are stored, from 0."""
        p = self.packed
        words = self._read(module + p.suffix, torch.int32)
        if p.method == "awq":
            return unpack_words(words, p.bits, AWQ_ORDER).t()
        return unpack_words(words.t().contiguous() if p.method == "gptq" else words, p.bits)[:, :k]

    def _expand(self, module: str) -> torch.Tensor:
        """float32 `[N, K]`: entries minus their zero points, times the scales of their columns' groups."""
        p, (n, k) = self.packed, self._shape(module)
        group_of = self._find_groups(module, k)
        scale = self._read(self._scale_name(module), torch.float32)
        scale = scale.t() if self._transposed else scale.reshape(n, -1)
        if int(group_of.max()) >= scale.shape[1]:
            what = f"names group {int(group_of.max())}, and there are {scale.shape[1]} scales a row"
            raise self._make_error(module + p.parts[3], what)
        values = self._read_entries(module, k).float()
        if p.symmetric:
            values -= 2 ** (p.bits - 1)
        else:
            values -= self._zeros(module, n, k).view(torch.uint8).float()[:, group_of]
        return values * scale[:, group_of]

    def _find_groups(self, module: str, k: int) -> torch.Tensor:
        """int64 `[K]`: the group of each column."""
        name = module + self.packed.parts[3]
        if self.source.shape(name) is None:
            return torch.arange(k) // (self.packed.group or k)
        if self.source.shape(name) != (k,):
            raise self._make_error(name, f"is {self.source.shape(name)}, not a group for each of {k} columns")
        found = self._read(name, torch.int64)
        if int(found.min()) < 0:
            raise self._make_error(name, "names a group below 0")
        return found

    def _zeros(self, module: str, n: int, k: int) -> torch.Tensor:
        """int8 `[N, groups]`, of 4 bits; of 8 bits they are bytes without a sign."""
        p, groups = self.packed, -(-k // (self.packed.group or k))
        name = module + p.parts[2]
        have, kind = self.source.shape(name), self.source.dtype(name)
        words = -(-n * p.bits // 32)
        if kind is torch.int8 and have == (n, groups) and not self._transposed:
            return self._read(name, torch.int8) + (8 if p.bits == 4 else -128)
        want = (groups, words) if self._transposed else (words, groups)
        if kind is not torch.int32 or have != want:
            raise self._make_error(name, f"is {have} {kind}, not zero points {want} of int32")
        stored = self._read(name, torch.int32)
        unsigned = unpack_words(
            stored if self._transposed else stored.t().contiguous(), p.bits, AWQ_ORDER if p.method == "awq" else None
        )
        zeros = unsigned[:, :n].t().contiguous().view(torch.int8)
        if p.bits == 8:
            return zeros + 1 if p.less_one else zeros  # 255 and 1 are 0
        return (zeros + 1) & 15 if p.less_one else zeros

    def _check_middle(self, module: str, n: int, k: int) -> None:
        """Check that all stored zero points are the middle of the range."""
        zeros = self._zeros(module, n, k)
        other = zeros[zeros != 8]
        if len(other):
            raise CheckpointError(
                f"{module}{self.packed.parts[2]} has zero points such as {int(other[0])}, and the config says that all "
                "are 8 (zero_point false).",
                remedy="set zero_point to true in the config if the model was quantized with zero points",
            )

    def _has_order(self, module: str) -> bool:
        """Whether the groups of a module's columns are stored."""
        return self.source.shape(module + self.packed.parts[3]) is not None

    def _find_order(self, module: str, groups: int) -> torch.Tensor | None:
        """int64: the group of each chunk of adjacent columns, which share a scale; None: they are in order."""
        name, k = module + self.packed.parts[3], self._shape(module)[1]
        width = self.packed.group or k
        if not self._has_order(module):
            return None
        found = find_chunk_groups(self._find_groups(module, k), width)
        if found is None:
            raise CheckpointError(
                f"{name}: columns that share a scale are not adjacent (desc_act, or actorder 'group').",
                there_is=f"weights with scales of {width} adjacent columns",
                remedy="quantize the model with desc_act = false, or with actorder 'static' or 'weight'",
            )
        if len(found) != groups or int(found.max()) >= groups:
            what = f"has {len(found)} chunks of columns of groups up to {int(found.max())}"
            raise self._make_error(name, f"{what}, and there are {groups} scales a row")
        return None if torch.equal(found, torch.arange(groups)) else found

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self.source.shape(name)
        if shape is None:
            raise self._make_error(name, "is missing")
        out = torch.empty(shape, dtype=dtype)
        self.source.read_into(name, out, Shard())
        return out

    def _make_error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{name} {what}: it is no part of a weight of {self.packed.bits} bits as {self.packed.method} packs it.",
            remedy="fetch or export the checkpoint again",
        )


def unpack_words(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Entries of 4 or 8 bits in the order in which words contain them, lowest bits first.

    Args:
        words: int32 `[R, C]`, contiguous.
        bits: bits per entry.
        order: positions in a word of consecutive entries; None: in order.

    Returns:
        uint8 `[R, C * 32 / bits]`.
    """
    found = words.view(torch.uint8)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), -1).flatten(1)
    return found if order is None else found.unflatten(1, (-1, len(order)))[..., list(order)].flatten(1)
