"""GGUF's blocks of quantized numbers as `QTensor`s: types that kernels may multiply without expanding them.

A tensor's rows are blocks of 32 or 256 columns one after the other. Every value is exactly the one that the type
defines, computed in float32: `scale * entry`, or `scale * entry + minimum`.

| type | becomes | | type | becomes |
|---|---|---|---|---|
| Q4_0 | int4_group32 | | Q2_K, Q5_1, Q5_K | int8_min16 |
| Q4_1, Q4_K | int4_min32 | | Q3_K, Q6_K | int8_group16 |
| Q5_0, Q8_0, IQ4_NL, IQ4_XS | int8_group32 | | MXFP4 | mxfp4 |

Source: the layouts of ggml's blocks (ggml-common.h) and the `gguf` package's dequantization, whose values are these.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from inferplane.binding import FormatReader, TensorSource
from inferplane.errors import CheckpointError
from inferplane.ops.formats import FORMATS, MINIMUMS
from inferplane.quant.mxfp4 import expand_pairs, expand_powers, take_share
from inferplane.types import PLAIN, QTensor, Shard, StoredWidths

ENTRIES_AT_ONCE = 2**24
"""Entries that are unpacked at a time."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The entries of IQ4_NL and IQ4_XS by their nibbles."""


class Unpacked(NamedTuple):
    """Blocks as integers with scales, and minimums or None: int8 `[B, columns]`, float32 `[B, groups]`."""

    data: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None


class BlockLayout(NamedTuple):
    """How a type's blocks are read: its format, columns and bytes of a block, a function of uint8 `[B, bytes]`, and the
    bits of signed integers that hold its entries."""

    format: str
    columns: int
    nbytes: int
    unpack: Callable[[torch.Tensor], Unpacked]
    entry_bits: int = 8

    @property
    def widths(self) -> StoredWidths:
        """Bits of its entries; in blocks of 256 columns, scales are integers times a number of the block."""
        return StoredWidths(self.entry_bits, has_unit_scales=self.columns == 256)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at a byte of each block, as float32 `[B, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low nibbles of bytes `[B, n]`, then the high ones: `[B, 2 n]`."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of 4 bytes `[B, 4]`, the lowest first, times 16: `[B, 32]`."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _to_signed(entries: torch.Tensor, less: int) -> torch.Tensor:
    """Unsigned entries below 128 as int8, less a number."""
    return entries.to(torch.int8) - less


def _q4_0(b: torch.Tensor) -> Unpacked:
    return Unpacked(_to_signed(_nibbles(b[:, 2:]), 8), _halves(b, 0))


def _q4_1(b: torch.Tensor) -> Unpacked:
    return Unpacked(_to_signed(_nibbles(b[:, 4:]), 0), _halves(b, 0), _halves(b, 2))


def _q5_0(b: torch.Tensor) -> Unpacked:
    return Unpacked(_to_signed(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), 16), _halves(b, 0))


def _q5_1(b: torch.Tensor) -> Unpacked:
    return Unpacked(_to_signed(_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), 0), _halves(b, 0), _halves(b, 2))


def _q8_0(b: torch.Tensor) -> Unpacked:
    return Unpacked(b[:, 2:].view(torch.int8), _halves(b, 0))


def _iq4_nl(b: torch.Tensor) -> Unpacked:
    return Unpacked(torch.tensor(IQ4_VALUES, dtype=torch.int8)[_nibbles(b[:, 2:]).int()], _halves(b, 0))


def _mxfp4(b: torch.Tensor) -> Unpacked:
    nibbles = _nibbles(b[:, 1:]).unflatten(1, (-1, 2))
    return Unpacked(expand_pairs(nibbles[..., 0] | nibbles[..., 1] << 4), expand_powers(b[:, :1], 0.5))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and eight minimums of 6 bits that 12 bytes `[B, 12]` hold, uint8 `[B, 8]` each."""
    low, high, rest = packed.split(4, 1)
    scales = torch.cat((low & 63, (rest & 15) | low >> 6 << 4), 1)
    return scales, torch.cat((high & 63, rest >> 4 | high >> 6 << 4), 1)


def _read_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of Q4_K and Q5_K, float32 `[B, 8]`."""
    scales, minimums = _six_bits(b[:, 4:16])
    return _halves(b, 0) * scales.float(), -(_halves(b, 2) * minimums.float())


def _q4_k(b: torch.Tensor) -> Unpacked:
    entries = _nibbles(b[:, 16:].reshape(-1, 32)).view(len(b), 256)  # 32 bytes hold 64 columns
    return Unpacked(_to_signed(entries, 0), *_read_scales(b))


def _q5_k(b: torch.Tensor) -> Unpacked:
    entries = _nibbles(b[:, 48:].reshape(-1, 32)).view(len(b), 8, 32)
    fifth = b[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # bit g of byte c: column c of group g
    scale, minimum = _read_scales(b)
    return Unpacked(
        _to_signed((entries | fifth << 4).flatten(1), 0), scale.repeat_interleave(2, 1), minimum.repeat_interleave(2, 1)
    )


def _q6_k(b: torch.Tensor) -> Unpacked:
    low = _nibbles(b[:, :128].reshape(-1, 64)).view(len(b), 2, 4, 32)  # 64 bytes hold 128 columns
    high = _pairs(b[:, 128:192])
    return Unpacked(
        _to_signed((low | high << 4).flatten(1), 32), _halves(b, 208) * b[:, 192:208].view(torch.int8).float()
    )


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """Entries of 2 bits: 32 bytes `[B, 64]` hold 128 columns, the lowest bits first: `[B, 2, 4, 32]`."""
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    return packed.view(len(packed), 2, 1, 32) >> shifts & 3


def _q2_k(b: torch.Tensor) -> Unpacked:
    entries, numbers = _pairs(b[:, 16:80].contiguous()), b[:, :16]
    scale, minimum = _halves(b, 80) * (numbers & 15).float(), -(_halves(b, 82) * (numbers >> 4).float())
    return Unpacked(_to_signed(entries.flatten(1), 0), scale, minimum)


def _q3_k(b: torch.Tensor) -> Unpacked:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    third = b[:, None, :32] >> bits & 1  # bit g of byte c: column c of group g; 0 takes 4 away
    entries = _pairs(b[:, 32:96].contiguous()).reshape(len(b), 8, 32) | third << 2
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    low, high = _nibbles(b[:, 96:104]), b[:, None, 104:108] >> shifts & 3
    scale = (low | high.flatten(1) << 4).float() - 32
    return Unpacked(_to_signed(entries.flatten(1), 4), _halves(b, 108) * scale)


def _iq4_xs(b: torch.Tensor) -> Unpacked:
    entries = torch.tensor(IQ4_VALUES, dtype=torch.int8)[_nibbles(b[:, 8:].reshape(-1, 16)).int()].view(len(b), 256)
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), 2).flatten(1)
    high = b[:, 2:4, None] >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8) & 3
    return Unpacked(entries, _halves(b, 0) * ((low | high.flatten(1) << 4).float() - 32))


LAYOUTS: Mapping[str, BlockLayout] = {
    "Q4_0": BlockLayout("int4_group32", 32, 18, _q4_0, 4),
    "Q4_1": BlockLayout("int4_min32", 32, 20, _q4_1, 5),
    "Q5_0": BlockLayout("int8_group32", 32, 22, _q5_0, 5),
    "Q5_1": BlockLayout("int8_min16", 32, 24, _q5_1, 6),
    "Q8_0": BlockLayout("int8_group32", 32, 34, _q8_0),
    "Q2_K": BlockLayout("int8_min16", 256, 84, _q2_k, 3),
    "Q3_K": BlockLayout("int8_group16", 256, 110, _q3_k, 3),
    "Q4_K": BlockLayout("int4_min32", 256, 144, _q4_k, 5),
    "Q5_K": BlockLayout("int8_min16", 256, 176, _q5_k, 6),
    "Q6_K": BlockLayout("int8_group16", 256, 210, _q6_k, 6),
    "IQ4_NL": BlockLayout("int8_group32", 32, 18, _iq4_nl),
    "IQ4_XS": BlockLayout("int8_group32", 256, 136, _iq4_xs),
    "MXFP4": BlockLayout("mxfp4", 32, 17, _mxfp4, 5),
}
"""How the blocks of each type are read."""


def unpack(kind: str, raw: torch.Tensor) -> QTensor:
    """A tensor's rows in canonical form, of the format that `LAYOUTS` names.

    Args:
        kind: the type, as GGUF names it.
        raw: uint8 `[rows, bytes]`, whole blocks.

    Raises:
        CheckpointError: the type is none of `LAYOUTS`, or rows are not whole blocks.
    """
    layout = LAYOUTS.get(kind)
    if layout is None or raw.dim() != 2 or raw.shape[1] % layout.nbytes:
        raise CheckpointError(
            f"Rows of {raw.shape[-1]} bytes are no blocks of GGUF's type {kind}.", there_is=", ".join(sorted(LAYOUTS))
        )
    n, blocks = len(raw), raw.shape[1] // layout.nbytes
    k, (_, bits, block) = blocks * layout.columns, FORMATS[layout.format]
    groups = k // block[1]
    data, scale = torch.empty(n, k, dtype=torch.int8), torch.empty(n, groups)
    minimum = torch.empty(n, groups) if layout.format in MINIMUMS else None
    step = max(1, ENTRIES_AT_ONCE // max(1, k))
    for first in range(0, n, step):
        part = slice(first, first + step)
        found = layout.unpack(raw[part].reshape(-1, layout.nbytes))
        times = layout.columns // block[1] // found.scale.shape[1]  # Q5_1: a scale of 32 columns serves two groups
        data[part] = found.data.reshape(-1, k)
        scale[part] = found.scale.repeat_interleave(times, 1).reshape(-1, groups)
        if minimum is not None and found.minimum is not None:
            minimum[part] = found.minimum.repeat_interleave(times, 1).reshape(-1, groups)
    return QTensor(data, scale, block=block, bits=bits, minimum=minimum)


def widen(q: QTensor, format: str) -> QTensor:
    """The same values in another of the formats with groups of 16 or 32 columns (`join_formats`).

    Args:
        q: canonical, of one of them.
        format: with groups that are as large or smaller, at least as many bits, and minimums if `q` has them.
    """
    _, bits, block = FORMATS[format]
    times = q.block[1] // block[1]
    scale = q.scale.repeat_interleave(times, -1)
    minimum = None if q.minimum is None else q.minimum.repeat_interleave(times, -1)
    if minimum is None and format in MINIMUMS:
        minimum = torch.zeros_like(scale)
    return QTensor(q.data, scale, block=block, bits=bits, minimum=minimum)


class BlockSource(Protocol):
    """A `TensorSource` of a GGUF file."""

    def raw(self, name: str, first_row: int = 0, rows: int | None = None) -> tuple[str, torch.Tensor]:
        """A tensor's type, and rows of it as uint8 `[rows, bytes]`."""


def read(source: TensorSource, name: str, shard: Shard, *, format: str) -> QTensor:
    """Read a weight; the values are exactly those of its type.

    Args:
        source: has `raw` too (`BlockSource`).
        name: the weight's name.
        shard: this rank's slice.
        format: the weight's, or the common one of several that are fused.

    Raises:
        CheckpointError: as `unpack`; or the slice splits columns that share a scale.
    """
    blocks: Any = source
    if shard.is_whole or shard.axis == 1:
        q = unpack(*blocks.raw(name))
        return widen(take_share(q, name, shard), format)
    first, last = shard.bounds((source.shape(name) or (0,))[0])
    return widen(unpack(*blocks.raw(name, first, last - first)), format)


READERS: Mapping[str, FormatReader] = {
    format: partial(read, format=format) for format in {layout.format for layout in LAYOUTS.values()}
}
"""A reader per format."""


def find_format(types: Mapping[str, str], name: str) -> str:
    """The format of a weight of a GGUF file: "plain" if it is not quantized, or has a type that is always expanded.

    Args:
        types: of the config's `quantization_config`: a weight's name, or a shell pattern of names -> its type.
        name: the weight's name.
    """
    layout = _find_layout(types, name)
    return PLAIN if layout is None else layout.format


def find_widths(types: Mapping[str, str], name: str) -> StoredWidths | None:
    """What is known of a weight's numbers by its type; None if it is not quantized.

    Args:
        types: as of `find_format`.
        name: the weight's name.
    """
    layout = _find_layout(types, name)
    return None if layout is None else layout.widths


def _find_layout(types: Mapping[str, str], name: str) -> BlockLayout | None:
    kind = types.get(name)
    if kind is None and ".experts." in name:
        kind = next((found for pattern, found in types.items() if fnmatch.fnmatchcase(name, pattern)), None)
    return LAYOUTS.get(kind or "")
