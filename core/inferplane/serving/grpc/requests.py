"""What a `ModelInferRequest` asks for: the source system's `IN`, or typed tensors.

`IN` holds a request of the native dialect as JSON, an object or a list of one; `OUT` brings its events as JSON. Typed:
`text_input` or `input_ids`, and parameters as one-element tensors, as the request's parameters, or as a JSON object in
`sampling_parameters`; `text_output`, `token_ids` and `finish_reason` come back.
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
from inferplane.serving.rendering import GeneratedChoice, compact
from inferplane.serving.service import Service
from inferplane.serving.wire import Count, SamplingFields, TokenId, validate

NATIVE_INPUT, NATIVE_OUTPUT = "IN", "OUT"
CONTROL = frozenset(("triton_enable_empty_final_response", "sequence_id", "sequence_start", "sequence_end", "priority"))
"""Parameters that are the protocol's own."""


class TypedRequest(SamplingFields):
    """A text or token ids to be continued, with its parameters."""

    text_input: Annotated[str, Field(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    max_tokens: Count | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None


class Answer(Protocol):
    """How one request's pieces become outputs."""

    def outputs(self, generation: Generation, piece: Piece) -> dict[str, tuple[str, Sequence[Any]]] | None:
        """Output name -> datatype and values; None while there is nothing to tell."""

    def whole(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, tuple[str, Sequence[Any]]]:
        """All of it at once."""


@dataclass(frozen=True)
class InferCall:
    """A request, understood.

    Args:
        ask: for admission.
        answer: renders.
        stream: piece by piece; False: as a whole, also on a stream.
    """

    ask: GenerateCall
    answer: Answer
    stream: bool = True


class NativeTensors:
    """`OUT`: the native dialect's events."""

    def __init__(self, request: native.NativeRequest, request_id: str) -> None:
        self._rendering = native.NativeRendering(request, request_id)

    def outputs(self, generation: Generation, piece: Piece) -> dict[str, tuple[str, Sequence[Any]]] | None:
        event = self._rendering.event(generation, piece)
        return None if event is None else {NATIVE_OUTPUT: (tensors.BYTES, [compact(event)])}

    def whole(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, tuple[str, Sequence[Any]]]:
        return {NATIVE_OUTPUT: (tensors.BYTES, [compact(self._rendering.whole(generation, choices))])}


class TypedTensors:
    """`text_output`, `token_ids`, `finish_reason`."""

    def outputs(self, generation: Generation, piece: Piece) -> dict[str, tuple[str, Sequence[Any]]] | None:
        return self._tensors([piece.delta])

    def whole(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, tuple[str, Sequence[Any]]]:
        return self._tensors([choice.delta() for choice in choices])

    def _tensors(self, deltas: Sequence[Delta]) -> dict[str, tuple[str, Sequence[Any]]]:
        return {
            "text_output": (tensors.BYTES, [d.text.encode() for d in deltas]),
            "token_ids": ("INT32", [t for d in deltas for t in d.token_ids]),
            "finish_reason": (tensors.BYTES, [(d.finish_reason or "").encode() for d in deltas]),
        }


async def wanted(request: Any, service: Service) -> InferCall:
    """What a `ModelInferRequest` asks for.

    Raises:
        ApiError: it is not understood; `param` names the tensor or field.
    """
    given = tensors.read(request)
    if NATIVE_INPUT in given:
        if len(given) > 1:
            odd = next(name for name in given if name != NATIVE_INPUT)
            raise invalid(f"{odd} beside {NATIVE_INPUT}, which holds the whole request.", odd)
        return await _native(given[NATIVE_INPUT], request.id, service, _limit(tensors.parameters(request)))
    return _typed(given, tensors.parameters(request), request.id)


def _limit(parameters: Mapping[str, Any]) -> float | None:
    """The protocol's own time limit, an integer of microseconds, in seconds; None for none."""
    found = parameters.get("timeout")
    return found / 1e6 or None if type(found) is int else None


async def _native(values: list[Any], request_id: str, service: Service, limit: float | None) -> InferCall:
    data = _json(NATIVE_INPUT, _one(NATIVE_INPUT, values))
    if isinstance(data, list):
        if len(data) != 1:
            raise invalid(f"{NATIVE_INPUT} holds {len(data)} requests; send one.", NATIVE_INPUT)
        data = data[0]
    if not isinstance(data, dict):
        raise invalid(f"{NATIVE_INPUT} holds no JSON object.", NATIVE_INPUT)
    if request_id:
        data.setdefault("req_id", request_id)
    if limit is not None:
        data.setdefault("timeout", limit)
    asked = validate(native.NativeRequest, data)
    ask = await native.build_call(asked, service.served, service.settings.native_text)
    return InferCall(ask, NativeTensors(asked, request_id))


def _typed(given: Mapping[str, list[Any]], parameters: Mapping[str, Any], request_id: str) -> InferCall:
    data: dict[str, Any] = {name: value for name, value in parameters.items() if name not in CONTROL}
    if type(data.get("timeout")) is int:
        data["timeout"] = _limit(parameters)
    for name, values in given.items():
        data[name] = values if name in ("input_ids", "stop_token_ids") else _plain(name, _one(name, values))
    more = data.pop("sampling_parameters", None)
    if more is not None:
        parsed = _json("sampling_parameters", more)
        if not isinstance(parsed, dict):
            raise invalid("sampling_parameters is no JSON object.", "sampling_parameters")
        data = {**parsed, **data}
    known = TypedRequest.model_fields
    if odd := next((name for name in data if name not in known), None):
        raise invalid(f"There is no input {odd[:100]!r}.", odd[:100], "unknown_parameter")
    asked = validate(TypedRequest, data)
    texts = [p for p in (asked.text_input, asked.input_ids) if p is not None]
    if len(texts) != 1:
        raise invalid(f"One of {NATIVE_INPUT}, text_input and input_ids is required.", "text_input")
    ask = GenerateCall(
        prompts=texts,
        sampling=asked.sampling(),
        max_tokens=asked.max_tokens,
        n=1,
        request_id=request_id or None,
        timeout_s=asked.timeout,
        words={"prompt": "text_input" if asked.text_input is not None else "input_ids", "timeout_s": "timeout"},
    )
    if asked.n not in (None, 1):
        raise invalid("n is 1 here; send several requests on the stream.", "n")
    return InferCall(ask, TypedTensors(), stream=asked.stream is not False)


def _one(name: str, values: list[Any]) -> Any:
    if len(values) != 1:
        raise invalid(f"{name} holds {len(values)} elements; one is wanted.", name)
    return values[0]


def _plain(name: str, value: Any) -> Any:
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
