"""Calls of a vendor's operators as data: noted where kernels run on an emulator, repeated where the vendor's own
library is, on fake tensors.

A tensor is noted by what a shape function can see: shape, strides, dtype.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1


@dataclass(frozen=True)
class Call:
    """One call, with its arguments and results encoded.

    Args:
        name: the operator's full name.
        args: by position. kwargs: by keyword.
        results: shape and dtype of every result, the type of one that is no tensor, None for one whose shape was left
            open.
    """

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]

    def fields(self) -> list[Any]:
        """As they are written; nothing is copied."""
        return [self.name, self.args, self.kwargs, self.results]


class Calls:
    """A set of calls, each noted once, in the order in which they first came."""

    def __init__(self) -> None:
        self.noted: dict[str, Call] = {}

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A listener for `Emulator.listen`."""
        call = Call(name, [encode(a) for a in args], {k: encode(v) for k, v in kwargs.items()}, results(result))
        self.noted.setdefault(json.dumps(call.fields()), call)

    def write(self, folder: Path) -> None:
        """Write them to a file of this process; many processes note into one folder."""
        if not self.noted:
            return
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"schema": SCHEMA, "calls": [call.fields() for call in self.noted.values()]}, indent=0)
        (folder / f"{os.getpid()}.json").write_text(text + "\n", encoding="utf-8")


def note_until_exit(emulator: Any, folder: Path) -> None:
    """Note an emulator's calls, and write them when the process ends."""
    noted = Calls()
    emulator.listeners.append(noted.note)
    atexit.register(noted.write, folder)


def read(folder: Path) -> list[Call]:
    """The calls of a folder's files, each once."""
    found: dict[str, Call] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{path.name}: schema {content.get('schema')!r}, expected {SCHEMA}")
        for call in content["calls"]:
            found[json.dumps(call)] = Call(*call)
    return list(found.values())


def results(result: Any) -> list[Any]:
    """Shape and dtype of each tensor and the type of anything else, in the schema's order; a list is opened."""
    if result is None:
        return []
    return [_result(each) for each in (result if isinstance(result, (list, tuple)) else [result])]


def _result(value: Any) -> Any:
    if isinstance(value, Open):
        return None
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype).removeprefix("torch.")]
    return type(value).__name__


class Open(torch.Tensor):
    """A result that an emulator leaves open: it is never read, and its shape means nothing."""


def make_open() -> torch.Tensor:
    """A result that is left open."""
    return torch.empty(0).as_subclass(Open)


def encode(value: Any) -> Any:
    """An argument as JSON."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": list(value.shape), "strides": list(value.stride()), "dtype": dtype}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {"entries": {key: encode(v) for key, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no argument of a schema")


def decode(value: Any, make: Callable[..., torch.Tensor]) -> Any:
    """The argument again; `make(shape, strides, dtype)` builds its tensors."""
    if isinstance(value, dict) and "entries" in value:
        return {key: decode(v, make) for key, v in value["entries"].items()}
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return make(value["tensor"], value["strides"], dtype) if "tensor" in value else dtype
    return [decode(v, make) for v in value] if isinstance(value, list) else value
