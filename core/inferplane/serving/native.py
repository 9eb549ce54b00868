"""The native dialect: the request and event format of the source system's own clients.

A stream is one JSON object per line and event, without the prefix of server-sent events. An error is
`{"error_msg", "error_code"}`, and the code is the HTTP status.

Source: https://paddlenlp.readthedocs.io, "llm/server", table of request parameters and example of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field

from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import GeneratedChoice, Rendering, encode_json
from inferplane.serving.wire import CONSTRAINTS, ID_PATTERN, MIN_TOP_P, Count, JsonObject, RequestBody, Stops, TokenId

if TYPE_CHECKING:
    from inferplane.serving.model import ServedModel

MARKS = frozenset(
    {
        *("text", "input_ids", "req_id", "max_dec_len", "min_dec_len", "seq_len", "topp", "penalty_score"),
        *("frequency_score", "presence_score", "return_usage", "infer_seed", "eos_token_ids", "response_type"),
    }
)
"""Fields that no OpenAI request has: a request with one of them is in the native dialect."""
DEFAULT_TOP_P, DEFAULT_TEMPERATURE = 0.7, 0.95
WORDS = {
    "max_tokens": "max_dec_len",
    "min_tokens": "min_dec_len",
    "top_p": "topp",
    "repetition_penalty": "penalty_score",
    "frequency_penalty": "frequency_score",
    "presence_penalty": "presence_score",
    "stop_token_ids": "eos_token_ids",
    "timeout_s": "timeout",
    "seed": "infer_seed",
    "request_id": "req_id",
}
RENAMED = ("repetition_penalty", "frequency_penalty", "presence_penalty", "stop_token_ids")
"""Fields of `SamplingParams` that differ from this dialect's in the name only."""
_ONE_OF: Any = [{"required": [name]} for name in ("text", "input_ids", "messages")]


class NativeMessage(JsonObject):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)] = "user"
    content: str


class NativeRequest(RequestBody):
    """A text, token ids or a conversation to be continued."""

    model_config = ConfigDict(**RequestBody.model_config, json_schema_extra={"anyOf": _ONE_OF})

    text: Annotated[str, Field(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[list[NativeMessage], Field(min_length=1, max_length=2048)] | None = None
    system: str | None = None
    req_id: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    max_dec_len: Count | None = None
    seq_len: Count | None = Field(None, description="As max_dec_len.")
    max_tokens: Count | None = Field(None, description="As max_dec_len.")
    min_dec_len: Count | None = None
    topp: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="As topp.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    penalty_score: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_score: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_score: Annotated[float, Field(ge=-2, le=2)] | None = None
    infer_seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(None, description="As infer_seed.")
    eos_token_ids: TokenId | Annotated[list[TokenId], Field(max_length=16)] | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None
    return_usage: bool | None = None
    return_all_tokens: bool | None = None
    response_type: Literal["fastdeploy"] | None = None
    model: str | None = Field(None, max_length=4096)


def is_native(data: Mapping[str, Any]) -> bool:
    """Return whether a body is in this dialect."""
    return not MARKS.isdisjoint(data)


async def build_call(request: NativeRequest, model: ServedModel, native_text: str) -> GenerateCall:
    """Return the call that a request makes.

    Args:
        request: of this dialect.
        model: renders conversations.
        native_text: "chat": `text` is a conversation of one message if the model has a template; "raw": it is the
            prompt as it is.

    Raises:
        ApiError: there is no text or more than one, or fields contradict each other.
    """
    more = request.model_extra or {}
    found = next((name for name in CONSTRAINTS if more.get(name) is not None), None)
    if found is not None:
        raise invalid(f"{found} is not supported in this dialect; use OpenAI's.", found, "unsupported")
    _single_name(request, "topp", "top_p")
    _single_name(request, "infer_seed", "seed")
    limit = _single_name(request, "max_dec_len", "seq_len", "max_tokens")
    prompt, special, word = await _prompt(request, model, native_text)
    return GenerateCall(
        prompts=[prompt],
        sampling=_sampling(request),
        max_tokens=None if limit is None else getattr(request, limit),
        request_id=request.req_id,
        timeout_s=request.timeout,
        special=special,
        operation="text_completion" if special else "chat",
        words={**WORDS, "prompt": word, "max_tokens": limit or "max_dec_len"},
    )


def _single_name(request: NativeRequest, *names: str) -> str | None:
    """Return which one of several fields with one meaning is given; None for none, ApiError 400 for several."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) > 1:
        raise invalid(f"{' and '.join(given)} mean the same; pass one.", given[1])
    return given[0] if given else None


async def _prompt(request: NativeRequest, model: ServedModel, native_text: str) -> tuple[str | list[int], bool, str]:
    """Return the prompt, whether it gets special tokens, and the field it came from."""
    word = _single_name(request, "input_ids", "text", "messages")
    if request.input_ids is not None:
        return request.input_ids, False, "input_ids"
    if word is None:
        raise invalid("One of text, input_ids and messages is required.", "text", "missing_required_parameter")
    if request.text is not None and (native_text == "raw" or model.template is None):
        return request.text, True, "text"
    messages = [m.model_dump() for m in request.messages or ()]
    if request.text is not None:
        messages = [{"role": "user", "content": request.text}]
    if request.system:
        messages = [{"role": "system", "content": request.system}, *messages]
    return await model.render(messages, None), False, word


def _sampling(request: NativeRequest) -> dict[str, Any]:
    """Return fields of `SamplingParams`, with this dialect's defaults."""
    topp = request.topp if request.topp is not None else request.top_p
    out: dict[str, Any] = {
        "top_p": max(DEFAULT_TOP_P if topp is None else topp, MIN_TOP_P),
        "temperature": DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
        "min_tokens": request.min_dec_len or 1,
    }
    given = {name: getattr(request, WORDS[name]) for name in RENAMED}
    given["stop"] = request.stop_sequences
    given["seed"] = request.infer_seed if request.infer_seed is not None else request.seed
    return {**out, **{name: value for name, value in given.items() if value is not None}}


class NativeUsage(JsonObject):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int


class NativeError(JsonObject):
    """What went wrong; the code is the HTTP status."""

    error_msg: str
    error_code: int
    req_id: str | None = None
    param: str | None = None


class NativeResponse(JsonObject):
    """The answer without a stream; `result` and `tokens_all` are the same text."""

    tokens_all: str
    result: str
    tokens_all_ids: list[int]
    tokens_all_num: int
    finish_reason: str
    req_id: str
    error_msg: str
    error_code: int
    usage: NativeUsage | None = None


class NativeRendering(Rendering):
    """The answer to one `NativeRequest`: `event` returns data, the other methods lines of JSON.

    Args:
        request: of this dialect.
        request_id: the answer's id if the request has none.
    """

    ping = b""  # the media type is SSE, which its clients expect, though the lines are plain JSON

    def __init__(self, request: NativeRequest, request_id: str) -> None:
        self._request = request
        self._id = request.req_id or request_id
        self._sent = 0
        self._all = GeneratedChoice()

    def event(self, generation: Generation, piece: Piece) -> dict[str, Any] | None:
        """Return a piece as this dialect's event; None if it has nothing to show yet."""
        delta, end = piece.delta, piece.delta.finish_reason is not None
        self._all.add(delta)
        if not end and (self._request.return_all_tokens or not delta.token_ids):
            return None
        source = self._all if self._request.return_all_tokens else delta
        out: dict[str, Any] = {
            "token": source.text,
            "token_ids": list(source.token_ids),
            "is_end": int(end),
            "send_idx": self._sent,
            "req_id": self._id,
            "error_msg": "",
            "error_code": 0,
            "usage": self._usage(generation),
        }
        self._sent += 1
        if end:
            ids = self._all.token_ids
            out.update(tokens_all=self._all.text, tokens_all_ids=ids, tokens_all_num=len(ids))
        return out

    def _usage(self, generation: Generation) -> dict[str, int]:
        return {"prompt_tokens": generation.prompt_tokens, "completion_tokens": generation.completion_tokens}

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        found = self.event(generation, piece)
        return b"" if found is None else encode_json(found) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return encode_json({**self.error_body(error), "is_end": 1}) + b"\n"

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return _error_body(error, self._id)

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, Any]:
        choice = choices[0]
        out = {
            "tokens_all": choice.text,
            "result": choice.text,
            "tokens_all_ids": choice.token_ids,
            "tokens_all_num": len(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "req_id": self._id,
            "error_msg": "",
            "error_code": 0,
        }
        return {**out, "usage": self._usage(generation)} if self._request.return_usage else out


def error_body_for(error: ApiError, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error in this dialect, as the answer to a request's JSON."""
    request_id = data.get("req_id")
    return _error_body(error, request_id if isinstance(request_id, str) else None)


def _error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    return {"error_msg": error.message, "error_code": error.status, "param": error.param, "req_id": request_id}
