"""MXFP4 as gpt-oss's checkpoints have it: entries of 4 bits (e2m1), and a power of two per 32 columns (e8m0)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from inferplane.binding import TensorSource
from inferplane.errors import CheckpointError
from inferplane.ops.formats import FORMATS, MXFP4_VALUES
from inferplane.types import QTensor, Shard, WeightFormat, read_tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of a weight's name: uint8 `[N, K / 32, 16]`, two entries a byte, the lower bits first, and uint8
`[N, K / 32]`."""
BIAS = 127
"""What is added to the exponents in scales."""
NOT_A_NUMBER = 255
"""The scale that means NaN."""
GROUP = FORMATS["mxfp4"][2][1]


def find_weights(names: Collection[str]) -> list[str]:
    """Names of the weights that have blocks.

    Args:
        names: all tensors of the checkpoint.
    """
    return [name.removesuffix(BLOCKS) for name in names if name.endswith(f".weight{BLOCKS}")]


def find_shape(source: TensorSource, name: str) -> tuple[int, ...]:
    """Shape `[N, K]` of a weight.

    Raises:
        CheckpointError: blocks or scales are missing, or do not fit each other.
    """
    blocks, scales = source.shape(name + BLOCKS) or (), source.shape(name + SCALES)
    kinds = {source.dtype(name + BLOCKS), source.dtype(name + SCALES)}
    if len(blocks) != 3 or blocks[2] * 2 != GROUP or scales != blocks[:2] or kinds != {torch.uint8}:
        raise CheckpointError(
            f"{name}{BLOCKS} {blocks} with {name}{SCALES} {scales} is no MXFP4 weight.",
            there_is=f"a reader for uint8 [N, K / {GROUP}, {GROUP // 2}] with uint8 scales [N, K / {GROUP}]",
            remedy="fetch or export the checkpoint again",
        )
    return blocks[0], blocks[1] * GROUP


def read(source: TensorSource, name: str, shard: Shard) -> QTensor:
    """Read a weight; the values are exactly those that are stored.

    Args:
        source: has blocks and scales.
        name: the weight's name.
        shard: this rank's slice.

    Raises:
        CheckpointError: as `find_shape`; or the slice splits columns that share a scale.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 5.3.
    """
    shape = find_shape(source, name)
    packed = read_tensor(source, name + BLOCKS, torch.uint8)
    scale = expand_powers(read_tensor(source, name + SCALES, torch.uint8), 0.5)  # entries are twice the values
    q = QTensor(expand_pairs(packed).view(shape), scale, block=FORMATS["mxfp4"][2], bits=FORMATS["mxfp4"][1])
    return take_share(q, name, shard)


def expand_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Twice the values of e2m1 entries, int8 `[..., 2 C]`.

    Args:
        packed: uint8 `[..., C]`, two entries a byte, the lower bits first.
    """
    signed = [*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)]
    of_byte = torch.tensor([(signed[byte & 15], signed[byte >> 4]) for byte in range(256)], dtype=torch.int8)
    # Both entries of a byte are looked up at once, as 16 bits: a large model has billions of them.
    pairs = of_byte.view(torch.int16).flatten().index_select(0, packed.flatten().int())
    return pairs.view(torch.int8).view(*packed.shape[:-1], 2 * packed.shape[-1])


def expand_powers(stored: torch.Tensor, unit: float) -> torch.Tensor:
    """The powers of two that e8m0 numbers stand for, times `unit`; float32, NaN for 255.

    Args:
        stored: uint8 of any shape.
        unit: a power of two.
    """
    return torch.ldexp(torch.full(stored.shape, unit), stored.int() - BIAS).masked_fill(
        stored == NOT_A_NUMBER, torch.nan
    )


def take_share(q: QTensor, name: str, shard: Shard) -> QTensor:
    """A rank's slice of a weight with groups of columns.

    Raises:
        CheckpointError: the slice splits columns that share a scale.
    """
    if shard.is_whole:
        return q
    group, (first, last) = q.block[1], shard.bounds(q.shape[shard.axis])
    if shard.axis == 1 and (first % group or last % group):
        raise CheckpointError(
            f"{name}: the share of a rank, columns {first} to {last}, splits a group of {group} columns.",
            remedy="choose another tensor-parallel size, or expert parallelism",
        )
    return q.shard(shard.axis, first, last)


MXFP4 = WeightFormat(read, find_weights, find_shape)
"""The format of `quant_method` "mxfp4"."""
