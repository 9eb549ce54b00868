"""Reading quantized tensors: how each format becomes a `QTensor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from inferplane.binding import FormatReader, TensorSource
from inferplane.binding.load import static_reader_name
from inferplane.errors import CheckpointError
from inferplane.ops import FORMATS
from inferplane.ops.formats import limit
from inferplane.types import QTensor, Shard
from inferplane.types.qtensor import scale_shape

SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of a weight's name that give the tensor with its scales; for both, value = data * scale."""


def read_fp8_block(source: TensorSource, name: str, shard: Shard) -> QTensor:
    """FP8 e4m3 in 128 x 128 blocks as DeepSeek-V3 stores it: `name` and `name_scale_inv`, value = data * scale_inv.

    Args:
        source: has both tensors; compressed-tensors calls the scales `name_scale`.
        name: the weight's name.
        shard: this rank's slice; taken after reading, because blocks and slices need not align.

    Raises:
        CheckpointError: the data are not FP8 e4m3, or the scales are not one float per block.

    Source: DeepSeek-V3's weight notes (README_WEIGHTS.md in the model's repository).
    """
    shape, scales = _shape_and_scales(source, name)
    dtype, bits, block = FORMATS["fp8_block"]
    have, want = source.shape(scales), scale_shape(shape, block)
    what = f"FP8 weight in blocks of {block}"
    _check(source, name, scales, dtype, have == want, what, f"floating-point scales {want}")
    q = QTensor(_read_fully(source, name, shape, dtype), _read_fully(source, scales, want), block=block, bits=bits)
    if shard.is_whole:
        return q
    mine = q.shard(shard.axis, *shard.bounds(shape[shard.axis]))
    return replace(mine, block=(mine.block[0], block[1]))  # even if the slice is narrower than a block


def read_fp8_row(source: TensorSource, name: str, shard: Shard) -> QTensor:
    """FP8 e4m3 with one scale, or with one per row: `name` and `name_scale`, value = data * scale.

    A single scale becomes one per row, of equal values: it adds a hundredth of a percent of the bytes, and lets parts
    of a fused weight have different scales.

    Args:
        source: has both tensors; transformers calls the scale `name_scale_inv`.
        name: the weight's name.
        shard: this rank's slice.

    Raises:
        CheckpointError: the data are not FP8 e4m3, or the scales are not floats, or neither one nor one per row.

    Source: compressed-tensors' "float-quantized" with strategies tensor and channel; vLLM's "fp8"; fbgemm_fp8.
    """
    shape, scales = _shape_and_scales(source, name)
    dtype, bits, _ = FORMATS["fp8_row"]
    have, rows = source.shape(scales), shape[0]
    one, each = ((), (1,), (1, 1)), ((rows,), (rows, 1))
    want = f"one floating-point scale, or {rows}"
    _check(source, name, scales, dtype, have in (*one, *each), "FP8 weight with a scale per row or a single one", want)
    scale = _read_fully(source, scales, have or ())
    scale = scale.reshape(-1, 1).expand(rows, 1).contiguous()
    q = QTensor(_read_fully(source, name, shape, dtype), scale, block=(1, shape[1]), bits=bits)
    return q if shard.is_whole else q.shard(shard.axis, *shard.bounds(shape[shard.axis]))


ACT_SUFFIXES = (".input_scale", ".activation_scale")
"""Suffixes of a module's name that give the scale of its input; for both, value = data * scale."""


def read_fp8_static(source: TensorSource, name: str, shard: Shard) -> QTensor:
    """As `read_fp8_row`, with the static scale of the activations multiplied by the weight: `input_scale`, one number.

    Raises:
        CheckpointError: as there; or the scale is missing, or is not one positive number.

    Source: vLLM's "fp8" with activation_scheme "static"; compressed-tensors' input_activations that are not dynamic.
    """
    q = read_fp8_row(source, name, shard)
    module = name.removesuffix(".weight")
    there = [module + suffix for suffix in ACT_SUFFIXES if source.shape(module + suffix) is not None]
    remedy = "fetch or export the checkpoint again, or set dynamic activation scales in its config"
    if not there:
        raise CheckpointError(
            f"{name} lacks {module}{ACT_SUFFIXES[0]}: the config says that activation scales are static.",
            remedy=remedy,
        )
    shape, kind = source.shape(there[0]) or (), source.dtype(there[0])
    one = shape in ((), (1,), (1, 1)) and (kind is None or kind.is_floating_point)
    scale = _read_fully(source, there[0], shape) if one else None
    if scale is None or not (scale.isfinite().all() and scale.item() > 0):
        what = f"{shape} {kind}" if scale is None else f"{scale.item():g}"
        raise CheckpointError(f"{there[0]} is {what}, not one positive floating-point number.", remedy=remedy)
    return replace(q, act_scale=scale.reshape(1))


def read_integers(source: TensorSource, name: str, shard: Shard, *, format: str) -> QTensor:
    """Symmetric integers, one a byte: `name` and `name_scale`, value = data * scale. Packed ones: see `UnpackedSource`.

    Args:
        source: has both tensors.
        name: the weight's name.
        shard: this rank's slice.
        format: one of `INTEGERS`; formats with a scale per row also accept a single scale.

    Raises:
        CheckpointError: the data are not int8 or exceed the format's bits; the scales are not floats or misshapen.

    Source: compressed-tensors' "int-quantized".
    """
    shape, scales = _shape_and_scales(source, name)
    dtype, bits, (rows, columns) = FORMATS[format]
    have = source.shape(scales)
    want = scale_shape(shape, (rows, columns or shape[-1]))
    fits = have == want or (not columns and have in ((), (1,), (1, 1), (shape[0],)))
    what = f"weight of {bits} bits as the config says"
    _check(source, name, scales, dtype, fits, what, f"floating-point scales {want}")
    data, scale = _read_fully(source, name, shape, dtype), _read_fully(source, scales, have or ())
    low, high = (int(x) for x in data.aminmax()) if data.numel() else (0, 0)
    if max(-low - 1, high) > limit(dtype, bits):
        raise CheckpointError(
            f"{name} has entries of {low} to {high}, and the config says that they have {bits} bits.",
            remedy="fetch or export the checkpoint again",
        )
    scale = scale.reshape(-1, want[1]).expand(want).contiguous()
    q = QTensor(data, scale, block=(rows, columns or shape[1]), bits=bits)
    if shard.is_whole:
        return q
    first, last = shard.bounds(shape[shard.axis])
    if shard.axis and columns and (first % columns or (last % columns and last != shape[1])):
        raise CheckpointError(
            f"{name}: the share of a rank, columns {first} to {last}, splits a group of {columns} columns.",
            remedy="choose another tensor-parallel size",
        )
    return q.shard(shard.axis, first, last)


INTEGERS = ("int8_row", "int8_group", "int8_group32", "int4_row", "int4_group", "int4_group64", "int4_group32")
"""Formats of integers that checkpoints have."""

READERS: Mapping[str, FormatReader] = {
    "fp8_block": read_fp8_block,
    "fp8_row": read_fp8_row,
    static_reader_name("fp8_row"): read_fp8_static,
    **{format: partial(read_integers, format=format) for format in INTEGERS},
}
"""Readers of the formats that core knows; plugins register more. Weights with static activation scales have their own
reader."""


def _shape_and_scales(source: TensorSource, name: str) -> tuple[tuple[int, ...], str]:
    """A weight's shape, and the name of the tensor with its scales."""
    shape = source.shape(name)
    assert shape is not None, name
    there = [name + suffix for suffix in SUFFIXES if source.shape(name + suffix) is not None]
    return shape, (*there, name + SUFFIXES[0])[0]


def _check(source: TensorSource, name: str, scales: str, dtype: torch.dtype, fits: bool, what: str, want: str) -> None:
    shape, have, kind = source.shape(name) or (), source.dtype(name), source.dtype(scales)
    numbers = have in (dtype, None) and (kind is None or kind.is_floating_point)
    if len(shape) != 2 or not numbers or not fits:
        raise CheckpointError(
            f"{name} {shape} {have} with {scales} {source.shape(scales)} {kind} is no {what}.",
            there_is=f"a reader for {dtype} with {want}",
            remedy="fetch or export the checkpoint again",
        )


def _read_fully(
    source: TensorSource, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    source.read_into(name, out, Shard())
    return out
