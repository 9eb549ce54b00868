"""Calls of a vendor's operators as data: noted where kernels run on an emulator, repeated where the vendor's own
library is, on fake tensors.

A tensor is noted by what a shape function can see: shape, strides, dtype.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1


class Calls:
    """A set of calls, each noted once, in the order in which they first came."""

    def __init__(self) -> None:
        self.noted: dict[str, tuple[str, list[Any], dict[str, Any]]] = {}

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A listener for `Emulator.heard_by`."""
        call = name, [encode(a) for a in args], {k: encode(v) for k, v in kwargs.items()}
        self.noted.setdefault(json.dumps(call), call)

    def write(self, folder: Path) -> None:
        """Write them to a file of this process; many processes note into one folder."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"schema": SCHEMA, "calls": list(self.noted.values())}, indent=0)
        (folder / f"{os.getpid()}.json").write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """The calls of a folder's files, each once: full name, positional and keyword arguments, encoded."""
    found: dict[str, tuple[str, list[Any], dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{path.name}: schema {content.get('schema')!r}, expected {SCHEMA}")
        for name, args, kwargs in content["calls"]:
            found[json.dumps((name, args, kwargs))] = name, args, kwargs
    return list(found.values())


def encode(value: Any) -> Any:
    """An argument as JSON."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": list(value.shape), "strides": list(value.stride()), "dtype": dtype}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no argument of a schema")


def decode(value: Any, make: Callable[..., torch.Tensor]) -> Any:
    """The argument again; `make(shape, strides, dtype)` builds its tensors."""
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return make(value["tensor"], value["strides"], dtype) if "tensor" in value else dtype
    return [decode(v, make) for v in value] if isinstance(value, list) else value
