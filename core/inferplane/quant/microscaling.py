"""Floating-point weights with a scale per 16 or 32 columns, as compressed-tensors and ModelOpt store them.

| format | entries | scale | columns | one number for all scales |
|---|---|---|---|---|
| mxfp4 | e2m1, two a byte, the lower bits first | e8m0, a power of two | 32 | |
| nvfp4 | e2m1, likewise | e4m3 | 16 | float32: multiplied (ModelOpt), or divided by (compressed-tensors) |
| mxfp8 | e4m3 | e8m0 | 32 | |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from inferplane.binding import TensorSource
from inferplane.errors import CheckpointError
from inferplane.ops.formats import FORMATS, FP8
from inferplane.quant.mxfp4 import expand_pairs, expand_powers, take_share
from inferplane.types import QTensor, Shard, WeightFormat, read_tensor

WEIGHT, SCALE, PACKED = ".weight", ".weight_scale", ".weight_packed"
MULTIPLIER, DIVISOR = ".weight_scale_2", ".weight_global_scale"
"""ModelOpt's factor of all scales of a weight, and compressed-tensors' divisor, which is its inverse."""
BYTES = (torch.uint8, torch.int8)
"""Dtypes of two entries in a byte; DeepSeek-V4's have a sign that means nothing."""
POWERS = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
"""Dtypes of scales that are powers of two."""
COMPRESSED = {
    ("nvfp4-pack-quantized", 4, 16, "tensor_group"): "nvfp4",
    ("mxfp4-pack-quantized", 4, 32, "group"): "mxfp4",
    ("mxfp8-quantized", 8, 32, "group"): "mxfp8",
}
"""Formats by compressed-tensors' format, bits, columns that share a scale, and strategy."""
MODELOPT = {"NVFP4": ("nvfp4", "NVFP4"), "W4A16_NVFP4": ("nvfp4", ""), "MXFP4": ("mxfp4", "MXFP4")} | {
    "MXFP8": ("mxfp8", "MXFP8")
}
"""Formats by ModelOpt's `quant_algo`, and what it quantizes activations to; empty: nothing. That of MXFP4 is done."""


def find_compressed(group: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The format of a group of compressed-tensors, and what its activations are quantized to (empty: nothing).

    Args:
        group: one of the config's `config_groups`.
        settings: the config.

    Returns:
        None if the group has another form.
    """
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or weights.get("type") != "float" or weights.get("symmetric") is False:
        return None
    stored = group.get("format") or settings.get("format")
    form = stored, weights.get("num_bits"), weights.get("group_size"), weights.get("strategy")
    format = next((name for known, name in COMPRESSED.items() if known == form), None)
    if format is None or not (inputs is None or isinstance(inputs, Mapping)):
        return None
    return format, f"{inputs.get('type')} of {inputs.get('num_bits')} bits" if inputs else ""


def _find_weights(names: Collection[str]) -> list[str]:
    packed = [name.removesuffix(PACKED) + WEIGHT for name in names if name.endswith(PACKED)]
    return packed + [name for name in names if name.endswith(WEIGHT) and _module(name) + SCALE in names]


def _find_shape(source: TensorSource, name: str, *, format: str) -> tuple[int, ...]:
    """Shape `[N, K]` of a weight.

    Raises:
        CheckpointError: a tensor is missing, or they do not fit each other.
    """
    module, columns = _module(name), FORMATS[format][2][1]
    stored = _find_stored_name(source, name)
    entries, scales = source.shape(stored) or (), source.shape(module + SCALE) or ()
    kinds = source.dtype(stored), source.dtype(module + SCALE)
    each = 1 if format == "mxfp8" else 2
    want = (FP8,) if format == "mxfp8" else BYTES, (FP8,) if format == "nvfp4" else POWERS
    fits = len(entries) == 2 and scales == (entries[0], -(-entries[1] * each // columns))
    if not fits or kinds[0] not in want[0] or kinds[1] not in want[1]:
        raise CheckpointError(
            f"{stored} {entries} {kinds[0]} with {module}{SCALE} {scales} {kinds[1]} is no weight of format {format}.",
            there_is=f"a reader for {want[0][0]} [N, K{'' if each == 1 else ' / 2'}] with scales [N, K / {columns}] of "
            f"{want[1][0]}",
            remedy="fetch or export the checkpoint again",
        )
    return entries[0], entries[1] * each


def _read(source: TensorSource, name: str, shard: Shard, *, format: str) -> QTensor:
    """Read a weight; the values are exactly those that are stored.

    Args:
        source: has entries and scales.
        name: the weight's name.
        shard: this rank's slice.
        format: "mxfp4", "nvfp4" or "mxfp8".

    Raises:
        CheckpointError: as `_find_shape`; or the factor of all scales is missing, or the slice splits columns that
            share a scale.

    Source: OCP Microscaling Formats (MX) Specification 1.0; the layouts of compressed-tensors and ModelOpt.
    """
    rows, columns = source.shape(name) or (0, 0)
    dtype, bits, block = FORMATS[format]
    module, stored = _module(name), _find_stored_name(source, name)
    if format == "mxfp8":
        data = torch.empty(rows, columns, dtype=dtype)
        source.read_into(stored, data, Shard())
    else:
        packed = torch.empty(rows, columns // 2, dtype=source.dtype(stored) or torch.uint8)
        source.read_into(stored, packed, Shard())
        data = expand_pairs(packed.view(torch.uint8))
    if format == "nvfp4":
        scale = read_tensor(source, module + SCALE, torch.float32)
        factor = _read_factor(source, module)
        scale = (scale / factor if source.shape(module + DIVISOR) is not None else scale * factor) / 2
    else:
        powers = read_tensor(source, module + SCALE, source.dtype(module + SCALE) or torch.uint8).view(torch.uint8)
        scale = expand_powers(powers, 0.5 if format == "mxfp4" else 1.0)
    return take_share(QTensor(data, scale, block=block, bits=bits), name, shard)


def _read_factor(source: TensorSource, module: str) -> torch.Tensor:
    """The factor or divisor of all scales of a weight, float32, one number."""
    names = [module + suffix for suffix in (DIVISOR, MULTIPLIER) if source.shape(module + suffix) is not None]
    shape = source.shape(names[0]) if names else None
    if shape not in ((), (1,)):
        raise CheckpointError(
            f"{module}{SCALE} needs one number, {module}{DIVISOR} or {module}{MULTIPLIER}: found {shape}.",
            remedy="fetch or export the checkpoint again",
        )
    return read_tensor(source, names[0], torch.float32).reshape(())


def _module(name: str) -> str:
    return name.removesuffix(WEIGHT)


def _find_stored_name(source: TensorSource, name: str) -> str:
    """The tensor with a weight's entries."""
    packed = _module(name) + PACKED
    return name if source.shape(packed) is None else packed


MICROSCALED: Mapping[str, WeightFormat] = {
    format: WeightFormat(partial(_read, format=format), _find_weights, partial(_find_shape, format=format))
    for format in ("mxfp4", "nvfp4", "mxfp8")
}
"""How weights of each format are read."""
