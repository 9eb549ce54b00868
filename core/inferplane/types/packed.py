"""How packed weights are written to files, and read from them in place of being packed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inferplane.errors import KernelError
from inferplane.types.qtensor import QTensor

DATA = "data"
"""The tensor of a packed weight that is one tensor."""
_PARTS = (DATA, "scale", "zero", "act_scale", "minimum")


@dataclass(frozen=True)
class StoredWeight:
    """What a file has of one packed weight.

    Args:
        tensors: by names of the packing's own. Written from any device; read on the device that kernels read.
        facts: integers, words, or lists of them: what the tensors do not say.
    """

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedStorage:
    """How the objects of one packing are written and read (`Packing.storage`).

    Args:
        version: changes with every change of what the bytes mean. Files of another version are refused.
        write: a packed weight -> its tensors and facts.
        read: `(stored, shape of the weight on this rank)` -> what `Packing.fn` would have returned. A file may say
            anything, and kernels trust what they read: check sizes and facts against the shape, and raise KernelError.
        allocate: a number of bytes -> memory on the host for them, uint8; None: memory of torch.
        why_not: why such objects cannot be written, in words that complete "cannot be written: "; empty if they can.
    """

    version: str
    write: Callable[[Any], StoredWeight]
    read: Callable[[StoredWeight, tuple[int, ...]], Any]
    allocate: Callable[[int], torch.Tensor] | None = None
    why_not: str = ""

    @classmethod
    def of_tensors(cls, version: str) -> PackedStorage:
        """The storage of packings of tensors and QTensors."""
        return cls(version, write_tensors, read_tensors)

    @classmethod
    def refuse(cls, why_not: str) -> PackedStorage:
        """The storage of packings whose objects cannot be written; `why_not` as the field."""

        def fail(*args: Any) -> Any:
            raise KernelError(f"It cannot be written: {why_not}.")

        return cls("", fail, fail, why_not=why_not)


def write_tensors(value: Any) -> StoredWeight:
    """A tensor, or the tensors of a `QTensor`; their strides are preserved.

    Raises:
        KernelError: it is neither, or its memory has gaps or overlaps.
    """
    if isinstance(value, torch.Tensor):
        return _write_parts({DATA: value}, {})
    if isinstance(value, QTensor):
        parts = {name: part for name in _PARTS if (part := getattr(value, name)) is not None}
        return _write_parts(parts, {"block": list(value.block), "bits": value.bits})
    raise KernelError(
        f"A packed weight of type {type(value).__name__} cannot be written.",
        there_is="tensors and QTensors",
        remedy="its author states how, as `Packing.storage`",
    )


def _write_parts(parts: Mapping[str, torch.Tensor], facts: dict[str, Any]) -> StoredWeight:
    tensors = {}
    for name, part in parts.items():
        order = sorted(range(part.ndim), key=part.stride, reverse=True)
        dense = part.permute(order)
        if not dense.is_contiguous():
            raise KernelError(
                f"A packed weight {tuple(part.shape)} with strides {part.stride()} has gaps or overlaps in memory.",
                remedy="its author packs it densely, or states how it is written, as `Packing.storage`",
            )
        tensors[name] = dense
        if order != list(range(part.ndim)):
            facts[f"{name}_axes"] = order
    return StoredWeight(tensors, facts)


def read_tensors(stored: StoredWeight, shape: tuple[int, ...]) -> torch.Tensor | QTensor:
    """What `write_tensors` was given. `shape` is not compared: packings may have another than the weight.

    Raises:
        KernelError: the facts are none that `write_tensors` writes.
    """
    facts, tensors = dict(stored.facts), {}
    for name, dense in stored.tensors.items():
        order = facts.pop(f"{name}_axes", list(range(dense.ndim)))
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(dense.ndim))):
            raise KernelError(f"A packed weight has axes {order!r}.", there_is=f"an order of {dense.ndim} axes")
        tensors[name] = dense.permute([order.index(axis) for axis in range(dense.ndim)])
    if not facts and tensors.keys() == {DATA}:
        return tensors[DATA]
    block, bits = facts.pop("block", None), facts.pop("bits", None)
    sizes = [*block, bits] if isinstance(block, list) else []
    if facts or not {DATA, "scale"} <= tensors.keys() <= set(_PARTS) or len(sizes) != 3:
        raise KernelError("A packed weight has other tensors and facts than tensors and QTensors have.")
    if not all(type(size) is int for size in sizes):
        raise KernelError(f"A packed weight has blocks of {block} with {bits} bits.")
    parts = {name: tensors.get(name) for name in _PARTS if name != DATA}
    if tensors["scale"].ndim != tensors[DATA].ndim or any(
        part is not None and part.dtype is not torch.float32 for part in parts.values()
    ):
        raise KernelError("A packed weight has scales that are not in float32, or not of its dimensions.")
    return QTensor(tensors[DATA], block=(sizes[0], sizes[1]), bits=bits, **parts)  # type: ignore[arg-type]
