"""Converts tensors and parameters of KServe's messages from and to Python values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferplane.serving.errors import invalid
from inferplane.serving.kserve import tensors
from inferplane.serving.kserve.tensors import BYTES, MAX_ENTRIES, GivenTensor

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""Datatype -> its field in `InferTensorContents`."""


def read(request: Any, longest: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the inputs of a `ModelInferRequest`, as `inferplane.serving.kserve.tensors.read` does.

    Args:
        request: the message.
        longest: as there.

    Raises:
        ApiError: as there; or there are too many tensors, or contents in two places.
    """
    for field in ("inputs", "raw_input_contents", "parameters"):
        if (number := len(getattr(request, field))) > MAX_ENTRIES:
            raise invalid(f"{number} {field}; at most {MAX_ENTRIES}.", field, "too_many")
    raw, inputs = list(request.raw_input_contents), list(request.inputs)
    if raw and len(raw) != len(inputs):
        raise invalid(f"{len(inputs)} inputs with {len(raw)} raw contents.", "raw_input_contents")
    given = []
    for i, tensor in enumerate(inputs):
        head = tensor.name, tensor.datatype, tensor.shape
        if raw and tensor.HasField("contents"):
            raise invalid(f"{tensor.name}: raw contents and contents; send one of them.", tensor.name)
        if raw:
            given.append(GivenTensor(*head, raw=raw[i]))
        else:
            values = CONTENTS.get(tensor.datatype)  # another datatype is refused before its values are looked at
            given.append(GivenTensor(*head, values=() if values is None else getattr(tensor.contents, values)))
    return tensors.read(given, longest)


def write(response: Any, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Add an output to a `ModelInferResponse`, with raw contents."""
    response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    response.raw_output_contents.append(tensors.encode(datatype, values))


def parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a request by name, as plain values."""
    out = {}
    for name, parameter in request.parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        out[name] = None if which is None else getattr(parameter, which)
    return out
