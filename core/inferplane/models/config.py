"""A checkpoint's config.json, read as plain data. Code inside a checkpoint is never run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.files import AGAIN
from inferplane.models.jsontext import read_text

_MEND = "correct the entry, or fetch the file again"
LIMIT_BYTES = 2**20
"""Of a config: several times what the longest published ones have."""
MOST_SIZE = 2**31
MOST = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 64,
    "n_routed_experts": 2**16,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "max_position_embeddings": 2**24,
}
"""Sizes beyond which an entry is taken for damage: some are counted through before a tensor is looked for."""


def read_object(path: Path) -> dict[str, Any]:
    """The entries of a JSON file.

    Raises:
        CheckpointError: it is no regular file, too large, or no JSON object.
    """
    try:
        entries = json.loads(read_text(path, LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.", remedy=AGAIN) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} holds no JSON object.", remedy=AGAIN)
    return entries


class Config(dict[str, Any]):
    """The entries of a config.json, with one spelling for what transformers 4 and 5 write differently.

    Args:
        entries: the file's content, or `config.to_dict()` of a transformers config.
        name: where it came from, for errors.

    Raises:
        CheckpointError: `max_position_embeddings` is not a positive integer.
    """

    def __init__(self, entries: Mapping[str, Any], name: str = "config") -> None:
        super().__init__(entries)
        self.name = name
        self.size("max_position_embeddings", 1)

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """Read `config.json` in a folder.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        path = Path(folder) / "config.json"
        if not os.path.lexists(path):
            raise CheckpointError(
                f"{folder} holds no config.json.", remedy="point to a folder in the Hugging Face layout"
            )
        return cls(read_object(path), str(path))

    def need(self, key: str) -> Any:
        """The value of `key`.

        Raises:
            CheckpointError: it is missing or null.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.name} lacks {key!r}.", remedy="check that the config belongs to this family")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            CheckpointError: missing without a default, or not a positive integer.
        """
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            return int(self.need(key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, "not a positive integer")
        return self._bounded(key, value)

    def count(self, key: str) -> int:
        """An integer from 0; 0 when it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "not an integer from 0")
        return self._bounded(key, value)

    def _bounded(self, key: str, value: int) -> int:
        most = MOST.get(key, MOST_SIZE)
        if value > most:
            raise self._wrong(key, f"more than {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0; `default` when it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return default
        if not is_number(value) or value <= 0:
            raise self._wrong(key, "not a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; `default` when it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "neither true nor false")
        return value

    def _wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {key} is {self.get(key)!r}, {why}.", remedy=_MEND)

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`.

        Raises:
            CheckpointError: the entry is not a list of names.
            UnsupportedModelError: there is none.
        """
        found = self.get("architectures") or []
        if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
            raise self._wrong("architectures", "not a list of names")
        if not found:
            raise UnsupportedModelError(
                f"{self.name} names no architecture.", remedy='add e.g. "architectures": ["LlamaForCausalLM"]'
            )
        return str(found[0])

    @property
    def rope(self) -> dict[str, Any]:
        """`rotary` with the usual base."""
        return self.rotary()

    def rotary(self, theta: float = 10000.0) -> dict[str, Any]:
        """Rotary settings: `rope_type`, `rope_theta` and what the type needs, from either spelling.

        Args:
            theta: the base where none is stated.

        Raises:
            CheckpointError: they are not a mapping.
        """
        for key in ("rope_parameters", "rope_scaling"):
            if self.get(key) is not None and not isinstance(self[key], Mapping):
                raise self._wrong(key, "not an object with entries")
        scaling = self.get("rope_parameters") or self.get("rope_scaling") or {}
        out = {k: v for k, v in scaling.items() if v is not None}
        out.setdefault("rope_theta", self.get("rope_theta") or theta)
        out.setdefault("rope_type", out.get("type", "default"))
        return out

    def refuse(self, **unsupported: tuple[Any, ...]) -> None:
        """Raise UnsupportedModelError when an entry has a value that this family's constructor does not implement.

        Args:
            unsupported: entry -> the values that are implemented; absent and null entries pass.
        """
        for key, known in unsupported.items():
            if self.get(key) is not None:
                self.check(key, self[key], known)

    def check(self, key: str, value: Any, known: tuple[Any, ...]) -> None:
        """Raise UnsupportedModelError unless `value`, found under `key`, is one of those that are implemented."""
        if value not in known:
            raise UnsupportedModelError(
                f"{self.name}: {key} = {value!r} is not implemented for {self.architecture}.",
                there_is=", ".join(map(repr, known)),
                remedy="see docs/adding-a-model.md",
            )

    @property
    def positions(self) -> int | None:
        """The most tokens of a sequence: `max_position_embeddings`, or what a rotary scaling stretches the context to.

        Configs with "dynamic" scaling state the unscaled number there, those with "yarn" either. None: nothing is said.
        """
        if self.get("max_position_embeddings") is None:
            return None
        most, kind, factor = self.size("max_position_embeddings"), self.rope["rope_type"], self.rope.get("factor")
        if kind not in ("dynamic", "yarn") or not is_number(factor) or factor is None or factor <= 0:
            return most
        context = self.rope.get("original_max_position_embeddings") if kind == "yarn" else None
        context = most if context is None else context
        if context is None or not is_number(context):
            return most
        return max(most, int(min(context * factor, MOST["max_position_embeddings"])))


def as_config(source: Any) -> Config:
    """A `Config` from a folder, a mapping, or a transformers config object.

    Raises:
        UsageError: it is none of these.
        CheckpointError: the folder holds no readable config, or an entry cannot be meant.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, (str, Path)):
        return Config.read(source)
    if isinstance(source, Mapping):
        return Config(source)
    if isinstance(source, type) or not callable(getattr(source, "to_dict", None)):
        raise UsageError(
            f"{source!r} is no model.",
            there_is="folders in the Hugging Face layout, mappings with a config's entries, and transformers configs",
        )
    return Config(source.to_dict(), type(source).__name__)


def is_number(value: Any) -> bool:
    """Whether a config's entry is a finite number; integers of more than 64 bits are none to torch."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)
