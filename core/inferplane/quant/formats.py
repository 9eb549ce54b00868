"""Reading quantized checkpoints: which tensors are quantized, and how each becomes a `QTensor`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from inferplane.binding import FormatReader, TensorSource
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.ops import FORMATS
from inferplane.types import PLAIN, QTensor, Shard
from inferplane.types.qtensor import scale_shape

FP8_SUFFIX = "_scale_inv"


def read_fp8_block(source: TensorSource, name: str, shard: Shard) -> QTensor:
    """FP8 e4m3 in 128 x 128 blocks as DeepSeek-V3 stores it: `name` and `name_scale_inv`, value = data * scale_inv.

    Args:
        source: has both tensors.
        name: the weight's name.
        shard: this rank's slice; cut after reading, because blocks and slices need not align.

    Raises:
        CheckpointError: the data are not FP8 e4m3, the scales no floats or not one a block.

    Source: DeepSeek-V3's weight notes (README_WEIGHTS.md in the model's repository).
    """
    shape, scales = source.shape(name), name + FP8_SUFFIX
    assert shape is not None, name
    dtype, bits, block = FORMATS["fp8_block"]
    have, want = source.shape(scales), scale_shape(shape, block)
    kind = source.dtype(scales)
    if source.dtype(name) not in (dtype, None) or have != want or not (kind is None or kind.is_floating_point):
        raise CheckpointError(
            f"{name} {shape} {source.dtype(name)} with {scales} {have} {kind} is no FP8 weight in blocks of {block}.",
            there_is=f"a reader for {dtype} with floating-point scales {want}",
            remedy="fetch or export the checkpoint again",
        )
    data = torch.empty(shape, dtype=dtype)
    scale = torch.empty(want, dtype=torch.float32)
    whole = Shard()
    source.read_into(name, data, whole)
    source.read_into(scales, scale, whole)
    q = QTensor(data, scale, block=block, bits=bits)
    if shard.size == 1:
        return q
    mine = q.shard(shard.axis, *shard.bounds(shape[shard.axis]))
    return replace(mine, block=(mine.block[0], block[1]))  # also where a slice is narrower than a block


READERS: Mapping[str, FormatReader] = {"fp8_block": read_fp8_block}
"""Readers of the formats that core knows; plugins register more."""


def format_of(settings: Mapping[str, Any] | None, names: Collection[str] | None) -> Callable[[str], str]:
    """A function from a checkpoint tensor's name to its weight format.

    Args:
        settings: the config's `quantization_config`, or None.
        names: the checkpoint's tensors; None when there is no checkpoint (dummy weights), and the config alone decides.

    Raises:
        CheckpointError: the settings are no settings.
        UnsupportedModelError: a method that is not implemented.
    """
    if settings is None:
        return lambda name: PLAIN
    if not isinstance(settings, Mapping):
        raise CheckpointError(
            f"The config's quantization_config is {settings!r}, not an object with entries.",
            remedy="correct the entry, or fetch the file again",
        )
    if not settings:
        return lambda name: PLAIN
    method, block = settings.get("quant_method"), settings.get("weight_block_size") or []
    block = list(block) if isinstance(block, tuple) else block
    if method != "fp8" or block != [128, 128]:
        raise UnsupportedModelError(
            f"Quantization method {method!r} with blocks {block or None} is not implemented.",
            there_is="'fp8' with weight_block_size [128, 128]",
            remedy="load an unquantized checkpoint, or add a plugin that registers the format",
        )
    if names is not None:
        return lambda name: "fp8_block" if name + FP8_SUFFIX in names else PLAIN

    def by_config(name: str) -> str:
        module = name.removesuffix(".weight").rpartition(".")[2]
        inside = ".self_attn." in name or ".mlp." in name
        return "fp8_block" if inside and module.endswith(("_proj", "_proj_with_mqa")) else PLAIN

    return by_config
