"""Static scales of the KV cache as compressed-tensors stores them: `self_attn.k_scale` and `v_scale`, and an entry of
the config."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from inferplane.models.build import Build
from inferplane.models.draft_layers import find_stored
from inferplane.models.reading.config import Config
from inferplane.models.reading.kv_scales import find_layer
from inferplane.models.registry import build
from inferplane.models.writing.safetensors_writer import PlannedTensor
from inferplane.quant import QuantFormats

TYPES = {"fp8": "float", "int8": "int"}
"""KV dtypes that a checkpoint may state, and compressed-tensors' word."""
PARTS = ("k_scale", "v_scale")


def list_layers(
    config: Config, stored: QuantFormats, names: Collection[str], plugins: Mapping[str, Any] | None
) -> list[str]:
    """The layers of a model that store keys, such as "model.layers.0", and its prediction layers.

    Args:
        config: of the model.
        stored: formats of its weights.
        names: of the tensors in its files.
        plugins: model families of plugins.

    Raises:
        UnsupportedModelError: the model's architecture is unknown.
    """
    model = build(Build(config, format_of=stored.format_of, mtp=True), plugins)
    return [find_layer(layer) for layer in (*model.layers, *find_stored(model, names)) if layer.kv_requests()]


def names_of(layer: str) -> tuple[str, str]:
    """The names of a layer's scales of K and of V."""
    k, v = (f"{layer}.self_attn.{part}" for part in PARTS)
    return k, v


def plan_scales(layers: Iterable[str]) -> Iterator[PlannedTensor]:
    """The tensors of all layers."""
    for layer in layers:
        yield from (PlannedTensor(name, (1,), 4, torch.float32) for name in names_of(layer))


def describe_scheme(kv_dtype: str) -> dict[str, Any]:
    """The config's `kv_cache_scheme`."""
    return {"num_bits": 8, "type": TYPES[kv_dtype], "strategy": "tensor", "symmetric": True, "dynamic": False}


def describe_alone() -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose weights are not quantized, without the scheme of its cache."""
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
    }
