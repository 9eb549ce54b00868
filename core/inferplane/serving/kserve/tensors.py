"""Tensors of KServe's protocol as Python values and back, with every stated length checked."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from inferplane.serving.errors import invalid

MAX_DIMENSIONS = 8
MAX_ENTRIES = 128
"""Most tensors or parameters of a request: the formats have some thirty names."""
DTYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "FP64": np.float64,
}
"""Datatype -> NumPy's dtype for raw contents (little-endian)."""
BYTES = "BYTES"
_LENGTH = struct.Struct("<I")


class GivenTensor(NamedTuple):
    """A tensor as a client sent it.

    Args:
        name: of the tensor.
        datatype: one of `DTYPES`, or `BYTES`.
        shape: sizes of its dimensions.
        values: its elements, in order; None: they are in `raw`.
        raw: its elements as bytes; strings have their lengths before them.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any] | None = None
    raw: bytes = b""


def read(given: Sequence[GivenTensor], longest: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return tensors by name, each as a flat list of numbers or bytes.

    Args:
        given: the tensors of a request.
        longest: most elements of the tensors that may have several; any other has one.

    Raises:
        ApiError: a tensor does not hold what its datatype and shape say, or too much, or two have the same name.
    """
    found: dict[str, list[Any]] = {}
    for tensor in given:
        if tensor.name in found:
            raise invalid(f"Two inputs are named {tensor.name!r}.", "inputs")
        if tensor.datatype not in (*DTYPES, BYTES):
            known = ", ".join((*DTYPES, BYTES))
            raise invalid(f"{tensor.name} has the datatype {tensor.datatype[:40]!r}. There is: {known}.", tensor.name)
        count = _count(tensor, longest.get(tensor.name, 1))
        values = _raw(tensor, count) if tensor.values is None else tensor.values
        if len(values) != count:
            raise invalid(f"{tensor.name} holds {len(values)} elements; its shape says {count}.", tensor.name)
        found[tensor.name] = list(values)
    return found


def _count(tensor: GivenTensor, longest: int) -> int:
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise invalid(f"{tensor.name} has {len(tensor.shape)} dimensions; at most {MAX_DIMENSIONS}.", tensor.name)
    if any(d < 0 for d in tensor.shape):
        raise invalid(f"{tensor.name} has the shape {list(tensor.shape)}.", tensor.name)
    count = prod(tensor.shape)
    if count > longest:
        code = "context_length_exceeded" if tensor.name == "input_ids" else "invalid_value"
        raise invalid(f"{tensor.name} holds {count} elements; at most {longest}.", tensor.name, code)
    return count


def _raw(tensor: GivenTensor, count: int) -> Sequence[Any]:
    data = tensor.raw
    if tensor.datatype == BYTES:
        return _strings(tensor.name, data, count)
    dtype = np.dtype(DTYPES[tensor.datatype]).newbyteorder("<")
    if len(data) % dtype.itemsize:
        raise invalid(f"{tensor.name} holds {len(data)} bytes, no multiple of {dtype.itemsize}.", tensor.name)
    if len(data) != count * dtype.itemsize:
        return range(len(data) // dtype.itemsize)  # only their number is of use
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def _strings(name: str, data: bytes, count: int) -> list[bytes]:
    """Split data into byte strings, each preceded by its length in four bytes; at most one more than `count`."""
    found: list[bytes] = []
    at = 0
    while at < len(data) and len(found) <= count:
        if at + _LENGTH.size > len(data):
            raise invalid(f"{name}: the length of a string is cut off.", name)
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise invalid(f"{name}: a string of {length} bytes with {len(data) - at} behind its length.", name)
        found.append(data[at : at + length])
        at += length
    return found


def encode(datatype: str, values: Sequence[Any]) -> bytes:
    """Return the raw contents of a tensor."""
    if datatype == BYTES:
        return b"".join(_LENGTH.pack(len(v)) + v for v in values)
    return np.asarray(values, np.dtype(DTYPES[datatype]).newbyteorder("<")).tobytes()
