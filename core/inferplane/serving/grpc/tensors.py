"""Converts tensors of KServe's protocol from and to Python values, and checks every stated length."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from inferplane.serving.errors import invalid

MAX_DIMENSIONS = 8
MAX_ENTRIES = 128
"""Most tensors or parameters of a request: the formats have some thirty names."""
DTYPES = {
    "BOOL": ("bool_contents", np.bool_),
    "UINT8": ("uint_contents", np.uint8),
    "UINT16": ("uint_contents", np.uint16),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "INT8": ("int_contents", np.int8),
    "INT16": ("int_contents", np.int16),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}
"""Datatype -> its field in `InferTensorContents`, and NumPy's dtype for raw contents (little-endian)."""
BYTES = "BYTES"
_LENGTH = struct.Struct("<I")


def read(request: Any, longest: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the inputs of a `ModelInferRequest` by name, each as a flat list of numbers or bytes.

    Args:
        request: the message.
        longest: most elements of the tensors that may have several; any other has one.

    Raises:
        ApiError: a tensor does not hold what its datatype and shape say, or too much, or two have the same name.
    """
    for field in ("inputs", "raw_input_contents", "parameters"):
        if (number := len(getattr(request, field))) > MAX_ENTRIES:
            raise invalid(f"{number} {field}; at most {MAX_ENTRIES}.", field, "too_many")
    raw, tensors = list(request.raw_input_contents), list(request.inputs)
    if raw and len(raw) != len(tensors):
        raise invalid(f"{len(tensors)} inputs with {len(raw)} raw contents.", "raw_input_contents")
    found: dict[str, list[Any]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.name in found:
            raise invalid(f"Two inputs are named {tensor.name!r}.", "inputs")
        if raw and tensor.HasField("contents"):
            raise invalid(f"{tensor.name}: raw contents and contents; send one of them.", tensor.name)
        if tensor.datatype not in (*DTYPES, BYTES):
            known = ", ".join((*DTYPES, BYTES))
            raise invalid(f"{tensor.name} has the datatype {tensor.datatype[:40]!r}. There is: {known}.", tensor.name)
        count = _count(tensor, longest.get(tensor.name, 1))
        values = _raw(tensor, raw[i], count) if raw else _read_typed(tensor)
        if len(values) != count:
            raise invalid(f"{tensor.name} holds {len(values)} elements; its shape says {count}.", tensor.name)
        found[tensor.name] = list(values)
    return found


def _count(tensor: Any, longest: int) -> int:
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise invalid(f"{tensor.name} has {len(tensor.shape)} dimensions; at most {MAX_DIMENSIONS}.", tensor.name)
    if any(d < 0 for d in tensor.shape):
        raise invalid(f"{tensor.name} has the shape {list(tensor.shape)}.", tensor.name)
    count = prod(tensor.shape)
    if count > longest:
        code = "context_length_exceeded" if tensor.name == "input_ids" else "invalid_value"
        raise invalid(f"{tensor.name} holds {count} elements; at most {longest}.", tensor.name, code)
    return count


def _read_typed(tensor: Any) -> Sequence[Any]:
    if tensor.datatype == BYTES:
        found: Sequence[Any] = tensor.contents.bytes_contents
        return found
    typed: Sequence[Any] = getattr(tensor.contents, DTYPES[tensor.datatype][0])
    return typed


def _raw(tensor: Any, data: bytes, count: int) -> Sequence[Any]:
    if tensor.datatype == BYTES:
        return _strings(tensor.name, data, count)
    dtype = np.dtype(DTYPES[tensor.datatype][1]).newbyteorder("<")
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


def write(response: Any, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Add an output to a `ModelInferResponse`, with raw contents."""
    response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if datatype == BYTES:
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(v)) + v for v in values))
    else:
        dtype = np.dtype(DTYPES[datatype][1]).newbyteorder("<")
        response.raw_output_contents.append(np.asarray(values, dtype).tobytes())


def parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a request by name, as plain values."""
    out = {}
    for name, parameter in request.parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        out[name] = None if which is None else getattr(parameter, which)
    return out
