"""The wire formats of a load: the body of each request, and what the events of its answer say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from inferplane.cli.screen import escape_controls
from inferplane.cli.verbs.bench.serve.event_stream import EventStream, LineStream, StreamError
from inferplane.cli.verbs.bench.serve.records import KIND_OF_STATUS, OTHER, LoadRequest

ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "native": "/v1/chat/completions",
    "grpc": "",
}
"""Name of an endpoint -> its path; gRPC has a method in place of one."""
DONE = b"[DONE]"
FAILED_REASONS = ("error", "abort")
MAX_COUNT = 2**31
"""Largest count of tokens that is believed."""
UNREADABLE = (ValueError, RecursionError, OverflowError)
"""What reading foreign JSON may raise; msgspec's errors and those of Unicode are ValueErrors."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class BodyOptions:
    """What every request of a load has.

    Args:
        model: its name; "" leaves it out.
        temperature: of sampling; None leaves it to the server.
        top_p: likewise.
        top_k: likewise.
        ignore_eos: generate all tokens.
        with_usage: ask a stream for its counts of tokens.
        extra: further fields; null removes a field.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    ignore_eos: bool = False
    with_usage: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def without(self, name: str) -> BodyOptions:
        """Return these options with one of them, a flag, off."""
        changed: dict[str, Any] = {name: False}
        return replace(self, **changed)

    def complete(self, fields: Mapping[str, Any]) -> bytes:
        """Return a body with the extra fields, as JSON."""
        body = {**fields, **self.extra}
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def make_body(endpoint: str, options: BodyOptions, request: LoadRequest, messages: Messages) -> bytes:
    """Return the body of a request.

    Args:
        endpoint: one of `ENDPOINTS`.
        options: of the load.
        request: what is sent.
        messages: the whole conversation; empty for a prompt.
    """
    if endpoint in ("native", "grpc"):
        return _native_body(options, request, messages)
    body: dict[str, Any] = {
        "model": options.model or None,
        "max_tokens": request.output_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "stream": True,
        "stream_options": {"include_usage": True} if options.with_usage else None,
        "ignore_eos": options.ignore_eos or None,
    }
    if endpoint == "chat":
        body["messages"] = messages or [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt or concatenate_messages(messages)
    return options.complete(body)


def concatenate_messages(messages: Messages) -> str:
    """Return a conversation as one text, for endpoints without messages."""
    return "\n\n".join(str(message["content"]) for message in messages)


def _native_body(options: BodyOptions, request: LoadRequest, messages: Messages) -> bytes:
    body: dict[str, Any] = {
        "max_dec_len": request.output_tokens,
        "min_dec_len": request.output_tokens if options.ignore_eos else None,
        "temperature": options.temperature,
        "topp": options.top_p,
        "top_k": options.top_k,
        "stream": True,
    }
    if messages:
        body["messages"] = messages
    elif isinstance(request.prompt, str):
        body["text"] = request.prompt
    else:
        body["input_ids"] = request.prompt
    return options.complete(body)


class _ChunkDelta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _ChunkChoice(msgspec.Struct):
    delta: _ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _ChunkUsage(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] | None = None
    usage: _ChunkUsage | None = None
    error: Any = None


class _NativeEvent(msgspec.Struct):
    token: str = ""
    is_end: int | bool = 0
    error_msg: str | None = ""
    error_code: int = 0
    usage: _ChunkUsage | None = None
    tokens_all_num: Any = None
    finish_reason: str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_native = msgspec.json.Decoder(_NativeEvent).decode


class AnswerReader:
    """Reads the events of one answer in OpenAI's form, of chats and completions.

    Attributes: `arrivals` (when each event with text came, by the clock of `feed`), `parts` (texts), `prompt_tokens`
    and `output_tokens` (the server's counts; None if it gave none), `finish_reason`, `is_complete` (the stream said
    that it ended; what follows does not count), `has_wrong_usage` (a count of the server was negative, no whole number
    or too large: none of the answer's is used).
    """

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.parts: list[str] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason = ""
        self.is_complete = self.has_wrong_usage = False
        self.failure = ""
        self.num_bytes = 0
        self._stream: EventStream | LineStream = EventStream()

    def feed(self, data: bytes, now: float) -> None:
        """Take a piece of the body that arrived at a time.

        Raises:
            StreamError: an event is not valid, or says that the answer failed; `failure` is then its kind, if it says
                one.
        """
        self.num_bytes += len(data)
        for event in self._stream.feed(data):
            self.read_event(event, now)

    def read_event(self, data: bytes, now: float) -> None:
        """Take the data of one event; errors as those of `feed`."""
        if self.is_complete:
            return
        if data == DONE:
            self.is_complete = True
            return
        try:
            self._read_chunk(_decode_chunk(data), now)
        except UNREADABLE as error:
            raise StreamError(f"an event is no chunk of an answer ({error}): {data[:80]!r}") from error

    def _read_chunk(self, chunk: _Chunk, now: float) -> None:
        if chunk.error is not None:
            self._refuse(chunk.error)
        if chunk.usage is not None:
            self._count(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices or ():
            if choice.finish_reason:
                self._finish(choice.finish_reason)
            text = choice.text or (choice.delta is not None and _text_of(choice.delta))
            if text:
                self.arrivals.append(now)
                self.parts.append(text)

    def _count(self, prompt_tokens: Any, output_tokens: Any) -> None:
        counts = [count for count in (prompt_tokens, output_tokens) if count is not None]
        if self.has_wrong_usage or not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
            self.has_wrong_usage = True
            self.prompt_tokens = self.output_tokens = None
            return
        if prompt_tokens is not None:
            self.prompt_tokens = prompt_tokens
        if output_tokens is not None:
            self.output_tokens = output_tokens

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if reason in FAILED_REASONS:
            raise StreamError(f"the server ended the answer with {reason!r}")

    def _refuse(self, error: Any) -> None:
        code = error.get("code") if isinstance(error, Mapping) else None
        self.failure = KIND_OF_STATUS.get(code, "") if isinstance(code, int) else ""
        raise StreamError(f"the server said in the stream: {error_words(error)}")


def _text_of(delta: _ChunkDelta) -> str:
    text = delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls or ""
    return text if isinstance(text, str) else str(text)


class NativeReader(AnswerReader):
    """Reads the events of one answer in the native dialect."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = LineStream()

    def read_event(self, data: bytes, now: float) -> None:
        if self.is_complete:
            return
        try:
            event = _decode_native(data)
        except UNREADABLE as error:
            raise StreamError(f"a line is no event of an answer ({error}): {data[:80]!r}") from error
        if event.error_msg or event.error_code:
            self.failure = KIND_OF_STATUS.get(event.error_code, "")
            raise StreamError(f"the server said in the stream: {event.error_msg} ({event.error_code})")
        if event.usage is not None:
            self._count(event.usage.prompt_tokens, event.usage.completion_tokens)
        if event.token:
            self.arrivals.append(now)
            self.parts.append(event.token)
        if event.is_end:
            self.is_complete = True
            self._count(None, event.tokens_all_num)
            self._finish(event.finish_reason or "end")


READERS: Mapping[str, Callable[[], AnswerReader]] = {
    "chat": AnswerReader,
    "completions": AnswerReader,
    "native": NativeReader,
    "grpc": NativeReader,
}
"""Name of an endpoint -> what reads its answers."""


def error_words(body: Any) -> str:
    """Return the message of an error, in whichever form servers send it: JSON of several kinds, or a text."""
    if isinstance(body, bytes):
        try:
            body = msgspec.json.decode(body)
        except UNREADABLE:
            body = body.decode("utf-8", "replace")
    while isinstance(body, Mapping):
        inner = next(
            (body[name] for name in ("error", "message", "error_msg", "detail", "msg") if body.get(name)), None
        )
        body = inner if inner is not None else msgspec.json.encode(body).decode()
    text = body if isinstance(body, str) else msgspec.json.encode(body).decode()
    return escape_controls(" ".join(text.split())[:300])


def failure_of_status(status: int) -> str:
    """Return the kind of failure that a status of HTTP means."""
    return KIND_OF_STATUS.get(status, OTHER)
