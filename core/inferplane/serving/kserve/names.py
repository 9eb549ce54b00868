"""The names of KServe's protocol: tensors, the model and its one version, and the paths over HTTP.

Source: https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.service import Service

VERSION = "1"
"""The one version of every model."""
TRITON_NAME = "model"
"""The source system's name of every model."""
INPUTS = {
    **{"IN": "BYTES", "text_input": "BYTES", "input_ids": "INT64", "max_tokens": "INT32", "stream": "BOOL"},
    **{"sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL", "return_finish_reason": "BOOL"},
    **{"return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL"},
}
OUTPUTS = {
    **{"OUT": "BYTES", "text_output": "BYTES", "token_ids": "INT32", "finish_reason": "BYTES"},
    **{"num_input_tokens": "UINT32", "num_output_tokens": "UINT32"},
}
EXTENSIONS = {"grpc": ("statistics",), "http": ("binary_tensor_data",)}
"""Extensions of the protocol, by transport."""
ROOT, MODELS = "/v2", "/v2/models/"
JSON_LENGTH = "inference-header-content-length"
"""The header with the length of the JSON of a body, where the contents of tensors follow it."""
_INFER = re.compile(rf"{MODELS}.+/infer")


def is_infer_path(path: str) -> bool:
    """Whether a POST to a path generates."""
    return _INFER.fullmatch(path) is not None


def is_kserve(path: str) -> bool:
    """Whether a path is of this protocol, health excepted, which is every client's."""
    return path == ROOT or path.startswith(MODELS)


def check_path(path: str) -> None:
    """Raise ApiError 400 for a path of this protocol with a control character: no name has one."""
    if is_kserve(path) and (found := next((c for c in path if ord(c) < 32 or 127 <= ord(c) < 160), None)):
        raise invalid(f"The path has the control character U+{ord(found):04X}.", "path")


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the JSON of an error in the form of its path: KServe's is a text, all others' OpenAI's object."""
    if not is_kserve(path):
        return error.body()
    return {"error": error.message, "code": error.code, "param": error.param}


def find_json_length(headers: Iterable[tuple[bytes, bytes]], num_bytes: int) -> int:
    """Return how many bytes of a body over HTTP are its JSON.

    Args:
        headers: of the request.
        num_bytes: of the body.

    Raises:
        ApiError: 400, the header that says so is no such number.
    """
    given = [value.strip() for name, value in headers if name == JSON_LENGTH.encode()]
    if not given:
        return num_bytes
    digits = given[0]
    if len(given) > 1 or not digits.isdigit() or len(digits) > 12 or int(digits) > num_bytes:
        message = f"{JSON_LENGTH} is no number of bytes of the body, which has {num_bytes}."
        raise invalid(message, JSON_LENGTH)
    return int(digits)


def length_of(tensor: str) -> int:
    """Return the length of a tensor, of which each has one dimension; -1 if it varies."""
    return -1 if tensor in ("input_ids", "token_ids") else 1


def resolve_name(service: Service, name: str, version: str) -> str:
    """Return the name to answer with; raise ApiError 404 for another model or version, 503 without a model."""
    model = service.ready_model
    if version not in ("", VERSION):
        raise ApiError(404, f"There is no version {version[:40]!r}; there is {VERSION}.", code="model_not_found")
    model.resolve_name(None if name == TRITON_NAME else name)
    return name or model.names[0]
