"""The native dialect: the request and event format of the source system's own clients.

A stream is one JSON object per line and event, without the prefix of server-sent events. An error is
`{"error_msg", "error_code"}`, and the code is the HTTP status.

Source: https://paddlenlp.readthedocs.io, "llm/server", table of request parameters and example of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from inferplane.serving.admission import GenerateCall
from inferplane.serving.chat.thinking import list_visible_tokens
from inferplane.serving.chat_template.fields import list_unread_keys
from inferplane.serving.chat_template.template import render_conversation
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import GeneratedChoice, Rendering, encode_json
from inferplane.serving.request_fields import CONSTRAINTS, Refused
from inferplane.serving.wire import (
    ID_PATTERN,
    MAX_MESSAGES,
    MIN_TOP_P,
    AtMost,
    Count,
    DescribedBy,
    JsonObject,
    Penalty,
    RepetitionPenalty,
    RequestBody,
    Seed,
    Stops,
    TokenId,
    TokenIds,
    any_given,
    read_messages,
)

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
REFUSED = {
    **dict.fromkeys((*CONSTRAINTS, "logprobs"), Refused("OpenAI's dialect", (False,))),
    "stop": Refused("stop_sequences", ([],)),
    "min_tokens": Refused("min_dec_len", (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), Refused("penalty_score", (1,))),
    "frequency_penalty": Refused("frequency_score", (0,)),
    "presence_penalty": Refused("presence_score", (0,)),
    "stop_token_ids": Refused("eos_token_ids", ([],)),
    **dict.fromkeys(("n", "num_return_sequences"), Refused("OpenAI's dialect", (1,))),
    **dict.fromkeys(("suppress_tokens", "bad_words_ids", "bad_token_ids"), Refused("OpenAI's dialect", ([],))),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), Refused("eos_token_ids", ([],))),
    **dict.fromkeys(("stop_token", "stop_words", "stop_strings"), Refused("stop_sequences", ([], ""))),
    "history_ask": Refused("messages", ([],)),
    "min_length": Refused("min_dec_len", (0,)),
    "top_k": Refused("OpenAI's dialect", (0, -1)),
    "min_p": Refused("OpenAI's dialect", (0,)),
    "logit_bias": Refused("OpenAI's dialect", ({},)),
    "ignore_eos": Refused("OpenAI's dialect", (False,)),
}
"""Fields of OpenAI's dialect that change the answer and that this one does not have."""
_SCHEMA: Any = {
    "allOf": [any_given("text", "input_ids", "messages"), {"anyOf": [{"required": [name]} for name in sorted(MARKS)]}]
}


class NativeMessage(JsonObject):
    """One message of a conversation, in OpenAI's form; `normalize_messages` checks it."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = "user"
    content: str | list[dict[str, Any]] | None = Field(None, description="Required in a message without tool_calls.")


class NativeRequest(RequestBody):
    """A text, token ids or a conversation to be continued."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED
    model_config = ConfigDict(**RequestBody.model_config, json_schema_extra=_SCHEMA)

    text: Annotated[str, Field(min_length=1)] | None = None
    input_ids: TokenIds | None = None
    messages: (
        Annotated[list[Annotated[Any, DescribedBy(NativeMessage)]], Field(min_length=1), AtMost(MAX_MESSAGES)] | None
    ) = None
    system: str | None = None
    req_id: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    max_dec_len: Count | None = None
    seq_len: Count | None = Field(None, description="As max_dec_len.")
    max_tokens: Count | None = Field(None, description="As max_dec_len.")
    min_dec_len: Count | None = None
    topp: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="As topp.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    penalty_score: RepetitionPenalty | None = None
    frequency_score: Penalty | None = None
    presence_score: Penalty | None = None
    infer_seed: Seed | None = None
    seed: Seed | None = Field(None, description="As infer_seed.")
    eos_token_ids: TokenId | Annotated[list[TokenId], AtMost(16)] | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None
    return_usage: bool | None = None
    return_all_tokens: bool | None = None
    response_type: Literal["fastdeploy"] | None = None
    model: str | None = Field(None, max_length=4096)

    @model_validator(mode="after")
    def _normalize(self) -> NativeRequest:
        if self.messages is not None:
            self.messages = read_messages(self.messages, "user")
        return self


def is_native(data: Mapping[str, Any]) -> bool:
    """Return whether a body is in this dialect."""
    return not MARKS.isdisjoint(data)


def refuse_mixture(data: Mapping[str, Any]) -> None:
    """Refuse a body of this dialect that is OpenAI's too: its client expects an answer of the other form.

    Raises:
        ApiError: 400, naming a field of this dialect.
    """
    given = {name for name, value in data.items() if value is not None}
    openai = "prompt" if "prompt" in given else "model with messages" if {"model", "messages"} <= given else ""
    if openai:
        mark = min(MARKS.intersection(data))
        raise invalid(f"{mark} is a field of the native dialect, {openai} of OpenAI's: pass fields of one.", mark)


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
    _single_name(request, "topp", "top_p")
    _single_name(request, "infer_seed", "seed")
    limit = _single_name(request, "max_dec_len", "seq_len", "max_tokens")
    prompt, special, word = await _prompt(request, model, native_text)
    template = model.template.facts if model.template is not None else None
    sampling = _sampling(request)
    if not special and word != "input_ids" and (marks := list_visible_tokens(model.reply_form(template))):
        sampling["visible_tokens"] = marks  # of thoughts, which are part of the text
    return GenerateCall(
        prompts=[prompt],
        sampling=sampling,
        max_tokens=None if limit is None else getattr(request, limit),
        request_id=request.req_id,
        timeout_s=request.timeout,
        special=special,
        operation="text_completion" if special else "chat",
        ignored=list_unread_keys(request.messages or (), template),
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
    messages = request.messages or []
    if request.text is not None:
        messages = [{"role": "user", "content": request.text}]
    if request.system:
        messages = [{"role": "system", "content": request.system}, *messages]
    return await render_conversation(model.template, messages), False, word


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
    return _error_body(error, list_repeated(data).get("req_id"))


def list_repeated(data: Mapping[str, Any]) -> dict[str, str]:
    """Return what of a request's JSON an error repeats."""
    request_id = data.get("req_id")
    return {"req_id": request_id} if isinstance(request_id, str) else {}


def _error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    return {"error_msg": error.message, "error_code": error.status, "param": error.param, "req_id": request_id}
