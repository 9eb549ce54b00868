"""The answer to a conversation in OpenAI's form, from the pieces of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferplane.serving.chat.reply import REASONING, JoinedReply, ReplyPlan, ReplyReader
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import GeneratedChoice, OpenAIRendering, finite_logprob

if TYPE_CHECKING:
    from inferplane.engine.request.results import TokenLogprob
    from inferplane.serving.model import ServedModel


class ChatRendering(OpenAIRendering):
    """The answer to one `ChatRequest`.

    Args:
        request: the request.
        plan: how replies are read.
        model: spells tokens.
        name: the model's name for the client.
        request_id: the answer's id.
    """

    def __init__(self, request: ChatRequest, plan: ReplyPlan, model: ServedModel, name: str, request_id: str) -> None:
        super().__init__(request, model, name, f"chatcmpl-{request_id}", "chat.completion.chunk")
        self._request, self._plan = request, plan
        self._readers: dict[int, ReplyReader] = {}
        self._is_text_only = not (request.logprobs or request.return_token_ids or self._includes_usage_so_far)

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
        if self._plan.is_plain:
            found: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
        else:
            found = self._reader(index).feed(delta.text)
        out = []
        if self._is_text_only:
            out += [self._encode(index, part) for part in found]
        else:
            logprobs = self._logprobs(delta.logprobs)
            ids = delta.token_ids if self._request.return_token_ids else None
            if found or ids or (logprobs and logprobs["content"]):
                first, *rest = found or [{}]
                out.append(self._chunk(index, first, logprobs, ids=ids))
                out += [self._chunk(index, part, ids=None if ids is None else []) for part in rest]
        if delta.finish_reason is not None:
            out.append(self._end(index, delta.finish_reason))
        return b"".join(out)

    def _reader(self, index: int) -> ReplyReader:
        found = self._readers.get(index)
        if found is None:
            found = self._readers[index] = ReplyReader(self._plan)
        return found

    def _encode(self, index: int, part: dict[str, Any]) -> bytes:
        if "tool_calls" in part:
            return self._chunk(index, part)
        encode_piece = lambda text: self._chunk(index, dict.fromkeys(part, text))  # noqa: E731
        return self._frames.encode((index, *part), next(iter(part.values())), encode_piece)

    def _end(self, index: int, reason: str) -> bytes:
        if self._plan.is_plain:
            return self._chunk(index, {}, reason=reason)
        reader = self._reader(index)
        out = [self._chunk(index, part) for part in reader.end()]
        out.append(self._chunk(index, {}, reason=_reason(reason, reader.num_calls > 0)))
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

    def usage(self, generation: Generation) -> dict[str, Any]:
        usage = super().usage(generation)
        if self._plan.form.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": generation.reasoning_tokens}
        return usage

    def _choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        reply = self._read(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if self._plan.has_reasoning:
            message.update(dict.fromkeys(REASONING, reply.reasoning or None))
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = reply.calls
        shown: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": _reason(choice.finish_reason, bool(reply.calls)),
        }
        if self._request.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _read(self, text: str) -> JoinedReply:
        if self._plan.is_plain:
            return JoinedReply(text)
        reader = ReplyReader(self._plan)
        return JoinedReply.of([*reader.feed(text), *reader.end()])

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


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
