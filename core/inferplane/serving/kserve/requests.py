"""Parses a request for inference, in the source system's form (`IN`) or as typed tensors.

`IN` holds a request of the native dialect as JSON, an object or a list of one; `OUT` returns its events as JSON. Typed
requests have `text_input` or `input_ids`, and parameters as one-element tensors, as the request's parameters, or as a
JSON object in `sampling_parameters`; they return `text_output`, `token_ids` and `finish_reason`. Clients of Triton's
vLLM backend are served as they are: they send numbers in `sampling_parameters` as strings, and flags about the outputs.

Source: https://github.com/triton-inference-server/vllm_backend, docs/additional_outputs.md and samples/client.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field
from pydantic_core import from_json

from inferplane.engine import Delta
from inferplane.engine.request.params import MAX_STOP_TOKEN_IDS
from inferplane.serving import native
from inferplane.serving.admission import Deadline, GenerateCall, check_prompt_lengths
from inferplane.serving.bodies import LARGE_BYTES, HeldMemory, object_bytes, parse_json
from inferplane.serving.errors import invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.kserve import tensors
from inferplane.serving.rendering import GeneratedChoice, encode_json
from inferplane.serving.request_fields import REFUSED, Refused, check_unknown
from inferplane.serving.service import Service
from inferplane.serving.wire import Count, SamplingFields, TokenIds, validate

NATIVE_INPUT, NATIVE_OUTPUT = "IN", "OUT"
CONTROL = frozenset(("triton_enable_empty_final_response", "sequence_id", "sequence_start", "sequence_end", "priority"))
"""Parameters of the protocol itself."""
TEXTS = ("model", "user", "stop", "text_input")
"""Sampling parameters that are texts, also where they look like a number."""
NUMBER_BYTES = 40
"""Memory for a number of a tensor as an element of a list."""


class TypedRequest(SamplingFields):
    """A text or token ids to continue, with parameters."""

    text_input: Annotated[str, Field(min_length=1)] | None = None
    input_ids: TokenIds | None = None
    max_tokens: Count | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    refused: ClassVar[Mapping[str, Refused]] = dict.fromkeys(
        ("return_logprobs", "return_cumulative_logprob", "logprobs"), Refused(neutral=(False,))
    )


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
    """A parsed request for inference.

    Args:
        call: the call that it makes.
        rendering: of its answer.
        stream: answer piece by piece; False: all at once, also on a stream.
        demands_stream: the request says so itself.
    """

    call: GenerateCall
    rendering: TensorRendering
    stream: bool = True
    demands_stream: bool = False


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
    """Returns `text_output`, `token_ids` and `finish_reason`, and numbers of tokens if the request asks for them.

    Args:
        request: of one sequence. If it does not want the input excluded, the output begins with it.
    """

    def __init__(self, request: TypedRequest) -> None:
        self._request = request
        self._before = (request.text_input or "") if request.exclude_input_in_output is False else ""

    def outputs(self, generation: Generation, piece: Piece) -> Outputs | None:
        return self._tensors(generation, [piece.delta])

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Outputs:
        return self._tensors(generation, [choice.delta() for choice in choices])

    def _tensors(self, generation: Generation, deltas: Sequence[Delta]) -> Outputs:
        before, self._before = self._before, ""
        found: Outputs = {
            "text_output": (tensors.BYTES, [f"{before}{d.text}".encode() for d in deltas]),
            "token_ids": ("INT32", [t for d in deltas for t in d.token_ids]),
            "finish_reason": (tensors.BYTES, [(d.finish_reason or "").encode() for d in deltas]),
        }
        if self._request.return_num_input_tokens:
            found["num_input_tokens"] = ("UINT32", [generation.prompt_tokens for _ in deltas])
        if self._request.return_num_output_tokens:
            found["num_output_tokens"] = ("UINT32", [len(d.token_ids) for d in deltas])
        return found


def longest_inputs(service: Service) -> dict[str, int]:
    """Return the most elements of the inputs that may have several."""
    return {"input_ids": service.ready_model.info.max_model_len, "stop_token_ids": MAX_STOP_TOKEN_IDS}


async def parse_infer_request(
    given: Mapping[str, list[Any]], parameters: Mapping[str, Any], request_id: str, service: Service, held: HeldMemory
) -> InferCall:
    """Parse a request.

    Args:
        given: its inputs, of `tensors.read`.
        parameters: of the request, by name.
        request_id: the client's id; "": there is none.
        service: reads what is long, and knows the model.
        held: gets what the values of the request take.

    Raises:
        ApiError: it is invalid; `param` names the tensor or field.
    """
    if NATIVE_INPUT in given:
        if len(given) > 1:
            extra = next(name for name in given if name != NATIVE_INPUT)
            raise invalid(f"{extra} beside {NATIVE_INPUT}, which holds the whole request.", extra)
        values = _one(NATIVE_INPUT, given[NATIVE_INPUT])
        if isinstance(values, bytes):
            held.add(await service.read(len(values), object_bytes, values))
        return await _native(values, request_id, service, _timeout_s(parameters))
    held.add(NUMBER_BYTES * sum(map(len, given.values())))
    text = _sampling_text(given, parameters)
    held.add(await service.read(len(text), object_bytes, text))
    return await service.read(len(text), _parse_typed, given, parameters, request_id)


def _sampling_text(given: Mapping[str, list[Any]], parameters: Mapping[str, Any]) -> bytes:
    """Return the JSON in `sampling_parameters`, which may be long; b"" without it."""
    values = [*given.get("sampling_parameters", ()), parameters.get("sampling_parameters")]
    return b"".join(
        v.encode(errors="replace") if isinstance(v, str) else v for v in values if isinstance(v, (bytes, str))
    )


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    """Return the protocol's own time limit, an integer of microseconds, in seconds; None without one.

    Raises:
        ApiError: it is no integer of 64 bits; the tensor "timeout" counts in seconds.
    """
    found = parameters.get("timeout")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < 2**63:
        raise invalid("The parameter timeout is no integer of microseconds, 0 to 2**63 - 1.", "timeout")
    return found / 1e6 or None


async def _native(given: Any, request_id: str, service: Service, timeout_s: float | None) -> InferCall:
    num_bytes = len(given) if isinstance(given, bytes) else 0
    data = await service.read(num_bytes, _json, NATIVE_INPUT, given)
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
    check_prompt_lengths(data.get("input_ids"), "input_ids", service.prompt_limits)
    parsed = await service.read(num_bytes, validate, native.NativeRequest, data)
    service.count_ignored(parsed)
    deadline = Deadline(service.settings.request_timeout_s, parsed.timeout)
    call = await deadline.enforce(native.build_call(parsed, service.ready_model, service.settings.native_text))
    return InferCall(
        replace(call, deadline=deadline), NativeTensors(parsed, request_id), demands_stream=parsed.stream is True
    )


def _parse_typed(given: Mapping[str, list[Any]], parameters: Mapping[str, Any], request_id: str) -> InferCall:
    data: dict[str, Any] = {name: value for name, value in parameters.items() if name not in CONTROL}
    if "timeout" in data:
        data["timeout"] = _timeout_s(parameters)
    for name, values in given.items():
        data[name] = values if name in ("input_ids", "stop_token_ids") else _decode(name, _one(name, values))
    known, refused = TypedRequest.model_fields, {**REFUSED, **TypedRequest.refused}
    more = data.pop("sampling_parameters", None)
    if more is not None:
        extra = _json("sampling_parameters", more)
        if not isinstance(extra, dict):
            raise invalid("sampling_parameters is no JSON object.", "sampling_parameters")
        parsed = {
            name: _parse_value(value) if name in known or name in refused else value for name, value in extra.items()
        }
        data = {**parsed, **{name: extra[name] for name in TEXTS if name in extra}, **data}
    check_unknown(data, known, refused)
    if unknown := next((name for name in data if name not in known and name not in refused), None):
        raise invalid(f"There is no input {unknown[:100]!r}.", unknown[:100], "unknown_parameter")
    typed = validate(TypedRequest, data)
    texts = [p for p in (typed.text_input, typed.input_ids) if p is not None]
    if len(texts) != 1:
        raise invalid(f"One of {NATIVE_INPUT}, text_input and input_ids is required.", "text_input")
    if typed.exclude_input_in_output is False and typed.text_input is None:
        raise invalid("exclude_input_in_output = false needs text_input.", "exclude_input_in_output")
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
    return InferCall(call, TypedTensors(typed), stream=typed.stream is not False, demands_stream=typed.stream is True)


def _parse_value(value: Any) -> Any:
    """Return a sampling parameter that may be a number, a flag or a list as text."""
    if not isinstance(value, str) or len(value) > LARGE_BYTES:
        return value
    try:
        return from_json(value.lower() if value in ("True", "False") else value, allow_inf_nan=False)
    except ValueError:
        return value  # it is refused under its name


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
        return parse_json(text)
    except ValueError as error:
        raise invalid(f"{name} is not valid JSON: {str(error)[:200]}.", name, "invalid_json") from error
