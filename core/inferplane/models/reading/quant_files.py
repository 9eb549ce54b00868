"""Reads quantization settings from the files of a model's folder, beside its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.models.reading.json_object import read_object
from inferplane.quant.spelling import spell

FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files with settings -> the method of those that do not tell it."""
NESTED = {"hf_quant_config.json": "quantization"}
"""The entry of a file that holds the settings."""


def read_beside(folder: Path) -> Mapping[str, Any] | None:
    """The settings that some tools write into a file of their own; None if there is none.

    Raises:
        CheckpointError: a file holds no JSON object.
    """
    for file in FILES:
        if os.path.lexists(folder / file):
            return read_settings(folder / file)
    return None


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in one of `FILES`.

    Raises:
        CheckpointError: it holds no JSON object.
    """
    entries: Any = read_object(path)
    if path.name in NESTED:
        entries = entries.get(NESTED[path.name])
    return spell(entries if isinstance(entries, dict) else {}, FILES[path.name])
