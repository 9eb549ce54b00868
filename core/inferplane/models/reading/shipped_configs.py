"""Configs that ship with Inferplane: published sizes of models, without weights, for plans on paper."""

from __future__ import annotations

import json
from pathlib import Path

from inferplane.errors import UsageError
from inferplane.models.reading.config import Config

PREFIX = "config:"
"""What the name of such a config begins with, where a model may be named."""
FOLDER = Path(__file__).resolve().parents[1] / "configs"


def list_shipped_configs() -> list[str]:
    """Their names, without the prefix."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_shipped_config(name: str) -> Config:
    """A config by its name; its sizes are those of transformers' class of the same architecture.

    Args:
        name: with the prefix.

    Raises:
        UsageError: no config has this name.
    """
    known = list_shipped_configs()
    if (stem := name.removeprefix(PREFIX).lower()) not in known:
        raise UsageError(
            f"No config that ships with Inferplane is named {name!r}.",
            there_is=", ".join(PREFIX + other for other in known) or "none in this installation",
            remedy="name one of these, or pass a config.json",
        )
    return Config(json.loads((FOLDER / f"{stem}.json").read_text(encoding="utf-8")), name)
