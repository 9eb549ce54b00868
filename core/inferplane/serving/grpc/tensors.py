"""Converts tensors of KServe's protocol from and to Python values, and checks every stated length."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from inferplane.serving.errors import invalid

MAX_ELEMENTS = 2**24
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


def read(request: Any) -> dict[str, list[Any]]:
    """Return the inputs of a `ModelInferRequest` by name, each as a flat list of numbers or bytes.

    Raises:
        ApiError: a tensor does not hold what its datatype and shape say, or two have the same name.
    """
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
        values = _raw(tensor, raw[i]) if raw else _typed(tensor)
        count = _count(tensor)
        if len(values) != count:
            raise invalid(f"{tensor.name} holds {len(values)} elements; its shape says {count}.", tensor.name)
        found[tensor.name] = values
    return found


def _count(tensor: Any) -> int:
    if any(d < 0 for d in tensor.shape):
        raise invalid(f"{tensor.name} has the shape {list(tensor.shape)}.", tensor.name)
    count = prod(tensor.shape)
    if count > MAX_ELEMENTS:
        raise invalid(f"{tensor.name} has {count} elements; at most {MAX_ELEMENTS}.", tensor.name)
    return count


def _typed(tensor: Any) -> list[Any]:
    if tensor.datatype == BYTES:
        return list(tensor.contents.bytes_contents)
    return list(getattr(tensor.contents, DTYPES[tensor.datatype][0]))


def _raw(tensor: Any, data: bytes) -> list[Any]:
    if tensor.datatype == BYTES:
        return _strings(tensor.name, data)
    dtype = np.dtype(DTYPES[tensor.datatype][1]).newbyteorder("<")
    if len(data) % dtype.itemsize:
        raise invalid(f"{tensor.name} holds {len(data)} bytes, no multiple of {dtype.itemsize}.", tensor.name)
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def _strings(name: str, data: bytes) -> list[bytes]:
    """Split data into byte strings, each preceded by its length in four bytes."""
    found, at = [], 0
    while at < len(data):
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
