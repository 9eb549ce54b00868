"""Reads entries of a GGUF file's metadata as what they have to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN

MAX_SIZE = 2**31
_FLOAT32_MAX = float(np.finfo(np.float32).max)
ARCHITECTURE = "general.architecture"
TYPE = "general.type"


def decimal(value: float) -> float:
    """The shortest decimal number that is this float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


class Metadata:
    """A file's metadata; entries are named as below the architecture's name (`block_count`).

    Args:
        values: the metadata.
        where: the file, for errors.
        tensors: the shapes of the file's tensors by name, in torch's order.
        read: returns the values of a small float32 tensor by name.

    Raises:
        CheckpointError: the file names no architecture.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        tensors: Mapping[str, tuple[int, ...]],
        read: Callable[[str], list[float]],
    ) -> None:
        self.values, self.where, self.tensors, self.read = values, where, tensors, read
        name = values.get(ARCHITECTURE)
        if not isinstance(name, str) or not name:
            raise self.wrong(ARCHITECTURE, name)
        self.architecture = name

    def wrong(self, key: str, value: Any) -> CheckpointError:
        """The error for an entry that is missing, or not what it has to be."""
        what = "lacks" if value is None else f"has {str(value)[:64]!r} for"
        return CheckpointError(f"{self.where} {what} {key}.", remedy=AGAIN)

    def get(self, key: str) -> Any:
        """An entry as it is; None if it is missing."""
        return self.values.get(f"{self.architecture}.{key}")

    def has(self, key: str) -> bool:
        """Whether the entry is there."""
        return self.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """An integer from 0. If it is stated by layer, it has to be the same in all.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise self.wrong(f"{self.architecture}.{key}", value)
        return value

    def sizes(self, key: str, count: int, default: int | None = None) -> list[int]:
        """An integer from 0 for each layer, the first `count` of those that are stated; one for all is repeated.

        Raises:
            CheckpointError: it is missing, or something else.
        """
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size >= count and (value >= 0).all():
            return [int(number) for number in value[:count]]
        return [self.size(key, default)] * count

    def size_of_some(self, key: str, default: int | None = None) -> int:
        """An integer from 1 that some layers have, while others have 0; 0 if all have 0.

        Raises:
            CheckpointError: it is missing without a default, differs between layers, or is something else.
        """
        found = set(self.sizes(key, self.layers, default)) - {0}
        if len(found) > 1:
            raise self.wrong(f"{self.architecture}.{key}", sorted(found))
        return found.pop() if found else 0

    def has_tensor(self, suffix: str) -> bool:
        """Whether some tensor's name ends like this."""
        return any(name.endswith(suffix) for name in self.tensors)

    def flags(self, key: str) -> list[bool] | None:
        """Truth values by layer; None if they are missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(type(flag) is bool for flag in value)):
            raise self.wrong(f"{self.architecture}.{key}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _FLOAT32_MAX:
            raise self.wrong(f"{self.architecture}.{key}", value)
        return decimal(value)

    def text(self, key: str, default: str) -> str:
        """A string.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(f"{self.architecture}.{key}", value)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.wrong(f"{self.architecture}.{key}", value)
        return value

    @property
    def layers(self) -> int:
        """Number of layers, without those that only predict further tokens.

        Raises:
            CheckpointError: it is missing, or not plausible.
        """
        count = self.size("block_count") - self.size("nextn_predict_layers", 0)
        if not 1 <= count <= 4096:
            raise self.wrong(f"{self.architecture}.block_count", count)
        return count

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self._positive("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads; where layers without attention have 0, that of the others."""
        count = self.size_of_some("attention.head_count_kv", self.heads)
        if not count:
            raise self.wrong(f"{self.architecture}.attention.head_count_kv", count)
        return count

    @property
    def head_dim(self) -> int:
        """Entries a head."""
        return self._positive("attention.key_length", self._positive("embedding_length") // self.heads)

    def _positive(self, key: str, default: int | None = None) -> int:
        value = self.size(key, default)
        if value < 1:
            raise self.wrong(f"{self.architecture}.{key}", value)
        return value
