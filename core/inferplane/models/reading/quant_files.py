"""Reads quantization settings from all files of a model's folder that may state them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError
from inferplane.models.reading.json_object import read_object
from inferplane.quant.agreement import complete, find_contradiction
from inferplane.quant.spelling import spell

FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "",
    "hf_quant_config.json": "modelopt",
}
"""Files with settings -> the method of those that do not tell it."""
NESTED = {"hf_quant_config.json": "quantization"}
"""The entry of a file that holds the settings."""
IN_CONFIG = ("quantization_config", "compression_config")
"""The entries of a config that hold settings; the second one is what compressed-tensors once called it."""


def settle_quantization(entries: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Return a config's entries with the quantization settings that it and the files beside it state.

    Those of the config count, then those of the first file; the others add what these do not state.

    Args:
        entries: of the config.
        folder: holds the files.
        name: the config's, for errors.

    Raises:
        CheckpointError: two of them contradict each other, or a file holds no JSON object.
    """
    inner = entries.get("text_config")
    inside = [place.get(key) for place in (entries, inner) if isinstance(place, Mapping) for key in IN_CONFIG]
    stated = [(name, settings) for settings in inside if isinstance(settings, Mapping) and settings]
    if not stated and any(settings is not None and settings != {} for settings in inside):
        return dict(entries)  # refused where they are read
    beside = [found for found in _read_beside(folder) if found[1]]
    if not beside:
        return dict(entries)
    every = [*stated, *beside]
    first, settled = every[0][0], dict(every[0][1])
    for i, (other, settings) in enumerate(every):
        for one, before in every[:i]:
            _check(one, before, other, settings)
        settled = complete(settled, settings)
    defaults = FILES if not stated else {}
    settled = spell(settled, defaults.get(Path(first).name, ""))
    out = dict(entries)
    is_inside = isinstance(inner, Mapping) and any(inner.get(key) is not None for key in IN_CONFIG)
    if isinstance(inner, Mapping) and is_inside:
        out["text_config"] = {**inner, "quantization_config": settled}
    if not is_inside or any(entries.get(key) is not None for key in IN_CONFIG):
        out["quantization_config"] = settled
    return out


def _read_beside(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The path and the settings of each of `FILES` that is there."""
    for file in FILES:
        path = folder / file
        if os.path.lexists(path):
            entries: Any = read_object(path)
            if file in NESTED:
                inner = entries.get(NESTED[file])
                entries = {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else {})}
            yield str(path), entries


def _check(one: str, settings: Mapping[str, Any], other: str, others: Mapping[str, Any]) -> None:
    found = find_contradiction(settings, others)
    if found is not None:
        raise CheckpointError(
            f"{one} and {other} contradict each other about the quantized weights: {found[0]} in the one, "
            f"{found[1]} in the other.",
            remedy="keep the file that belongs to the tensors, and correct or remove the other one's settings",
        )
