"""Small random checkpoints, written without transformers: it would look for libraries that are emulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inferplane.models import Build, Config, build
from inferplane.models.writing.kv_scales import describe_alone, describe_scheme, list_layers, names_of
from inferplane.quant import QuantFormats


def write_checkpoint(folder: Path, config: dict[str, Any], kv_dtype: str = "", scales: tuple[float, ...] = ()) -> Path:
    """Write a model of a family in bfloat16. With a KV dtype it has static scales: those of layer i are i + 1 times the
    given ones, of K and V.
    """
    read, draw = Config(config, "made"), torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for _, weight in build(Build(read)).weights():
        shape = weight.shape if len(weight.shape) < 3 else (weight.shape[0] * weight.shape[1], weight.shape[2])
        rows = weight.rows or [shape[0] // max(1, len(weight.parts))] * len(weight.parts)
        for part, count in zip(weight.parts, rows, strict=True):
            noise = torch.randn(count, *shape[1:], generator=draw)
            tensors[part] = (1 + noise / 10 if len(shape) == 1 else noise / 8).bfloat16()
    settings = {}
    if kv_dtype:
        for i, layer in enumerate(list_layers(read, QuantFormats(), set(tensors), None)):
            for name, scale in zip(names_of(layer), scales):
                tensors[name] = torch.tensor([scale * (i + 1)])
        settings["quantization_config"] = {**describe_alone(), "kv_cache_scheme": describe_scheme(kv_dtype)}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder
