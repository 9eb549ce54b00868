"""Parses a `ModelInferRequest`, in the source system's form (`IN`) or as typed tensors.

`IN` holds a request of the native dialect as JSON, an object or a list of one; `OUT` returns its events as JSON. Typed
requests have `text_input` or `input_ids`, and parameters as one-element tensors, as the request's parameters, or as a
JSON object in `sampling_parameters`; they return `text_output`, `token_ids` and `finish_reason`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field
from pydantic_core import from_json

from inferplane.engine import Delta
from inferplane.serving import native
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.grpc import tensors
from inferplane.serving.rendering import GeneratedChoice, encode_json
from inferplane.serving.service import Service
from inferplane.serving.wire import Count, SamplingFields, TokenId, validate

NATIVE_INPUT, NATIVE_OUTPUT = "IN", "OUT"
CONTROL = frozenset(("triton_enable_empty_final_response", "sequence_id", "sequence_start", "sequence_end", "priority"))
"""Parameters of the protocol itself."""


class TypedRequest(SamplingFields):
    """A text or token ids to continue, with parameters."""

    text_input: Annotated[str, Field(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    max_tokens: Count | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None


Outputs = dict[str, tuple[str, Sequence[Any]]]
"""Output name -> datatype and values."""


class TensorRendering(Protocol):
    """Turns one request's pieces into outputs."""

    def outputs(self, generation: Generation, piece: Piece) -> Outputs | None:
        """Return the outputs of a piece; None if it has nothing to show yet."""

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Outputs:
        """Return the outputs of the whole answer."""


@dataclass(frozen=True)
class InferCall:
    """A parsed `ModelInferRequest`.

    Args:
        call: the call that it makes.
        rendering: of its answer.
        stream: answer piece by piece; False: all at once, also on a stream.
    """

    call: GenerateCall
    rendering: TensorRendering
    stream: bool = True


class NativeTensors:
    """Returns `OUT`: the native dialect's events."""

    def __init__(self, request: native.NativeRequest, request_id: str) -> None:
        self._rendering = native.NativeRendering(request, request_id)

    def outputs(self, generation: Generation, piece: Piece) -> Outputs | None:
        event = self._rendering.event(generation, piece)
        return None if event is None else {NATIVE_OUTPUT: (tensors.BYTES, [encode_json(event)])}

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Outputs:
        return {NATIVE_OUTPUT: (tensors.BYTES, [encode_json(self._rendering.full_response(generation, choices))])}


class TypedTensors:
    """Returns `text_output`, `token_ids` and `finish_reason`."""

    def outputs(self, generation: Generation, piece: Piece) -> Outputs | None:
        return self._tensors([piece.delta])

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Outputs:
        return self._tensors([choice.delta() for choice in choices])

    def _tensors(self, deltas: Sequence[Delta]) -> Outputs:
        return {
            "text_output": (tensors.BYTES, [d.text.encode() for d in deltas]),
            "token_ids": ("INT32", [t for d in deltas for t in d.token_ids]),
            "finish_reason": (tensors.BYTES, [(d.finish_reason or "").encode() for d in deltas]),
        }


async def parse_infer_request(request: Any, service: Service) -> InferCall:
    """Parse a `ModelInferRequest`.

    Raises:
        ApiError: it is invalid; `param` names the tensor or field.
    """
    given = tensors.read(request)
    if NATIVE_INPUT in given:
        if len(given) > 1:
            extra = next(name for name in given if name != NATIVE_INPUT)
            raise invalid(f"{extra} beside {NATIVE_INPUT}, which holds the whole request.", extra)
        return await _native(given[NATIVE_INPUT], request.id, service, _timeout_s(tensors.parameters(request)))
    return _typed(given, tensors.parameters(request), request.id)


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    """Return the protocol's own time limit, an integer of microseconds, in seconds; None without one."""
    found = parameters.get("timeout")
    return found / 1e6 or None if type(found) is int else None


async def _native(values: list[Any], request_id: str, service: Service, timeout_s: float | None) -> InferCall:
    data = _json(NATIVE_INPUT, _one(NATIVE_INPUT, values))
    if isinstance(data, list):
        if len(data) != 1:
            raise invalid(f"{NATIVE_INPUT} holds {len(data)} requests; send one.", NATIVE_INPUT)
        data = data[0]
    if not isinstance(data, dict):
        raise invalid(f"{NATIVE_INPUT} holds no JSON object.", NATIVE_INPUT)
    if request_id:
        data.setdefault("req_id", request_id)
    if timeout_s is not None:
        data.setdefault("timeout", timeout_s)
    parsed = validate(native.NativeRequest, data)
    call = await native.build_call(parsed, service.ready_model, service.settings.native_text)
    return InferCall(call, NativeTensors(parsed, request_id))


def _typed(given: Mapping[str, list[Any]], parameters: Mapping[str, Any], request_id: str) -> InferCall:
    data: dict[str, Any] = {name: value for name, value in parameters.items() if name not in CONTROL}
    if type(data.get("timeout")) is int:
        data["timeout"] = _timeout_s(parameters)
    for name, values in given.items():
        data[name] = values if name in ("input_ids", "stop_token_ids") else _decode(name, _one(name, values))
    more = data.pop("sampling_parameters", None)
    if more is not None:
        extra = _json("sampling_parameters", more)
        if not isinstance(extra, dict):
            raise invalid("sampling_parameters is no JSON object.", "sampling_parameters")
        data = {**extra, **data}
    known = TypedRequest.model_fields
    if unknown := next((name for name in data if name not in known), None):
        raise invalid(f"There is no input {unknown[:100]!r}.", unknown[:100], "unknown_parameter")
    typed = validate(TypedRequest, data)
    texts = [p for p in (typed.text_input, typed.input_ids) if p is not None]
    if len(texts) != 1:
        raise invalid(f"One of {NATIVE_INPUT}, text_input and input_ids is required.", "text_input")
    call = GenerateCall(
        prompts=texts,
        sampling=typed.sampling_fields(),
        max_tokens=typed.max_tokens,
        n=1,
        request_id=request_id or None,
        timeout_s=typed.timeout,
        words={"prompt": "text_input" if typed.text_input is not None else "input_ids", "timeout_s": "timeout"},
    )
    if typed.n not in (None, 1):
        raise invalid("n is 1 here; send several requests on the stream.", "n")
    return InferCall(call, TypedTensors(), stream=typed.stream is not False)


def _one(name: str, values: list[Any]) -> Any:
    if len(values) != 1:
        raise invalid(f"{name} holds {len(values)} elements; one is expected.", name)
    return values[0]


def _decode(name: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"{name} is not valid UTF-8.", name) from error


def _json(name: str, text: Any) -> Any:
    if not isinstance(text, (bytes, str)):
        raise invalid(f"{name} holds JSON, as BYTES.", name)
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"{name} is not valid JSON: {str(error)[:200]}.", name, "invalid_json") from error
