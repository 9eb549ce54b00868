"""The answer to a conversation in OpenAI's form, from the pieces of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat.tools import Call, ToolPlan, ToolReader, new_call_id
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import GeneratedChoice, OpenAIRendering, finite_logprob

if TYPE_CHECKING:
    from inferplane.engine.request.results import TokenLogprob
    from inferplane.serving.model import ServedModel


class ChatRendering(OpenAIRendering):
    """The answer to one `ChatRequest`.

    Args:
        request: the request.
        plan: what its tools mean.
        model: spells tokens.
        name: the model's name for the client.
        request_id: the answer's id.
    """

    def __init__(self, request: ChatRequest, plan: ToolPlan, model: ServedModel, name: str, request_id: str) -> None:
        super().__init__(request, model, name, f"chatcmpl-{request_id}", "chat.completion.chunk")
        self._request, self._plan = request, plan
        self._readers: dict[int, ToolReader] = {}
        self._named: set[int] = set()

    # -- a stream

    def opening(self, generation: Generation) -> bytes:
        chunks = []
        for i in range(generation.num_choices):
            self.count_so_far(generation, i)
            chunks.append(self._chunk(i, {"role": "assistant", "content": ""}))
        return b"".join(chunks)

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        delta, index = piece.delta, piece.choice
        self.count_so_far(generation, index, len(delta.token_ids))
        reader = self._readers.setdefault(index, ToolReader(self._plan))
        content = reader.feed(delta.text)
        out = []
        if self._plan.mode == "named":
            out.append(self._arguments(index, delta.text))
        logprobs = self._logprobs(delta.logprobs)
        ids = delta.token_ids if self._request.return_token_ids else None
        if content and ids is None and logprobs is None and not self._includes_usage_so_far:
            out.append(self._frames.encode(index, content, lambda text: self._chunk(index, {"content": text})))
        elif content or ids or (logprobs and logprobs["content"]):
            out.append(self._chunk(index, {"content": content} if content else {}, logprobs, ids=ids))
        if delta.finish_reason is not None:
            out.append(self._end(index, reader, delta.finish_reason))
        return b"".join(out)

    def _arguments(self, index: int, text: str) -> bytes:
        """Return a piece of the arguments of the one requested call."""
        if index not in self._named:
            self._named.add(index)
            return self._chunk(index, {"tool_calls": [_format_streamed(0, Call(self._plan.named, text))]})
        if not text:
            return b""
        return self._chunk(index, {"tool_calls": [{"index": 0, "function": {"arguments": text}}]})

    def _end(self, index: int, reader: ToolReader, reason: str) -> bytes:
        rest, calls = reader.end()
        out = []
        if rest and self._plan.mode != "named":
            out.append(self._chunk(index, {"content": rest}))
        for i, call in enumerate(calls):
            out.append(self._chunk(index, {"tool_calls": [_format_streamed(i, call)]}))
        called = bool(calls) or self._plan.mode == "named"
        out.append(self._chunk(index, {}, reason=_reason(reason, called)))
        return b"".join(out)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, *, reason: str | None = None, ids: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if ids is not None:
            choice["token_ids"] = ids
        return self.chunk(choice)

    # -- without a stream

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, Any]:
        found = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return {**self._head, "object": "chat.completion", "choices": found, "usage": self.usage(generation)}

    def _choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        reader = ToolReader(self._plan)
        content = reader.feed(choice.text)
        rest, calls = reader.end()
        if self._plan.mode == "named":
            calls, rest = [Call(self._plan.named, rest)], ""
        message: dict[str, Any] = {"role": "assistant", "content": content + rest, "refusal": None}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_full(call) for call in calls]
        shown: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": _reason(choice.finish_reason, bool(calls)),
        }
        if self._request.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    # -- log-probabilities

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        shown = []
        for t in tokens or ():
            top = [self._token(i, p) for i, p in t.top]
            shown.append({**self._token(t.token_id, t.logprob), "top_logprobs": top})
        return {"content": shown}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._model.token_text
        if spelled is None:
            return {"token": str(token), "logprob": finite_logprob(logprob), "bytes": None}
        name, raw = spelled.name_of(token), list(spelled.bytes_of(token))
        return {"token": name, "logprob": finite_logprob(logprob), "bytes": raw}


def _full(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def _format_streamed(index: int, call: Call) -> dict[str, Any]:
    return {"index": index, **_full(call)}


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
