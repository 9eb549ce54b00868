"""A checkpoint's config.json, read as plain data. Code inside a checkpoint is never run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError, UnsupportedModelError


class Config(dict[str, Any]):
    """The entries of a config.json, with one spelling for what transformers 4 and 5 write differently.

    Args:
        entries: the file's content, or `config.to_dict()` of a transformers config.
        name: where it came from, for errors.
    """

    def __init__(self, entries: Mapping[str, Any], name: str = "config") -> None:
        super().__init__(entries)
        self.name = name

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """Read `config.json` in a folder.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        path = Path(folder) / "config.json"
        try:
            entries = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} holds no config.json.", remedy="point to a folder in the Hugging Face layout"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}.", remedy="fetch the file again") from error
        if not isinstance(entries, dict):
            raise CheckpointError(f"{path} holds no JSON object.", remedy="fetch the file again")
        return cls(entries, str(path))

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
            raise CheckpointError(f"{self.name}: {key} is {value!r}, not a positive integer.")
        return value

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`.

        Raises:
            UnsupportedModelError: there is none.
        """
        found = self.get("architectures") or []
        if not found:
            raise UnsupportedModelError(
                f"{self.name} names no architecture.", remedy='add e.g. "architectures": ["LlamaForCausalLM"]'
            )
        return str(found[0])

    @property
    def rope(self) -> dict[str, Any]:
        """Rotary settings: `rope_type`, `rope_theta` and what the type needs, from either spelling."""
        scaling = self.get("rope_parameters") or self.get("rope_scaling") or {}
        out = {k: v for k, v in scaling.items() if v is not None}
        out.setdefault("rope_theta", self.get("rope_theta") or 10000.0)
        out.setdefault("rope_type", out.get("type", "default"))
        return out

    def refuse(self, **unsupported: tuple[Any, ...]) -> None:
        """Raise UnsupportedModelError when an entry has a value that this family's constructor does not implement.

        Args:
            unsupported: entry -> the values that are implemented; absent and null entries pass.
        """
        for key, known in unsupported.items():
            value = self.get(key)
            if value is not None and value not in known:
                raise UnsupportedModelError(
                    f"{self.name}: {key} = {value!r} is not implemented for {self.architecture}.",
                    there_is=", ".join(map(repr, known)),
                    remedy="see docs/adding-a-model.md",
                )


def as_config(source: Any) -> Config:
    """A `Config` from a folder, a mapping, or a transformers config object."""
    if isinstance(source, Config):
        return source
    if isinstance(source, (str, Path)):
        return Config.read(source)
    if isinstance(source, Mapping):
        return Config(source)
    return Config(source.to_dict(), type(source).__name__)
