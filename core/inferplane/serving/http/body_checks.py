"""From a body's fields to a request, by route: the one place where a format is read, in whatever process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

from inferplane.serving import native
from inferplane.serving.admission import PromptLimits, check_prompt_lengths
from inferplane.serving.bodies import object_bytes
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat.tools import plan_tools
from inferplane.serving.errors import ApiError
from inferplane.serving.http.completions import CompletionRequest
from inferplane.serving.http.embeddings import EmbeddingRequest
from inferplane.serving.http.tokens import read_detokenize, read_tokenize
from inferplane.serving.large_bodies.reader import InvalidBody
from inferplane.serving.wire import RequestBody, parse, unknown_fields, validate

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
ALIASES = {f"{CHAT}/completions": COMPLETIONS, f"{CHAT}/chat/completions": CHAT}
"""Paths that OpenAI's client uses if its base URL is `.../v1/chat/completions`, as in the source system's example."""

Read = Callable[[dict[str, Any], PromptLimits], RequestBody]
"""Makes a request of a body's fields; raises ApiError 400 that names the first wrong one."""


def read_completion(data: dict[str, Any], limits: PromptLimits) -> CompletionRequest:
    """Return the fields of a completion as a request; raise ApiError 400 that names the first wrong one."""
    check_prompt_lengths(data.get("prompt"), "prompt", limits)
    return validate(CompletionRequest, data)


def read_chat(data: dict[str, Any], limits: PromptLimits) -> ChatRequest:
    """Return the fields of a chat as a request; raise ApiError 400 that names the first wrong one."""
    request = validate(ChatRequest, data)
    request.check_consistency()
    return request


def read_embedding(data: dict[str, Any], limits: PromptLimits) -> EmbeddingRequest:
    """Return the fields of a request for vectors; raise ApiError 400 that names the first wrong one."""
    check_prompt_lengths(data.get("input"), "input", limits)
    return validate(EmbeddingRequest, data)


def read_native(data: dict[str, Any], limits: PromptLimits) -> native.NativeRequest:
    """Return fields of the native dialect as a request; raise ApiError 400 that names the first wrong one."""
    check_prompt_lengths(data.get("input_ids"), "input_ids", limits)
    return validate(native.NativeRequest, data)


def _read_chat_and_tools(data: dict[str, Any], limits: PromptLimits) -> ChatRequest:
    request = read_chat(data, limits)
    plan_tools(request)
    return request


def _either_dialect(openai: Read) -> Read:
    """Return what reads a body in OpenAI's dialect or in the native one."""

    def read(data: dict[str, Any], limits: PromptLimits) -> RequestBody:
        if not native.is_native(data):
            return openai(data, limits)
        native.refuse_mixture(data)
        try:
            return read_native(data, limits)
        except ApiError as error:
            raise InvalidBody(error, native.list_repeated(data)) from error

    return read


_READ: dict[str, Read] = {
    COMPLETIONS: _either_dialect(read_completion),
    CHAT: _either_dialect(_read_chat_and_tools),
    EMBEDDINGS: read_embedding,
    TOKENIZE: read_tokenize,
    DETOKENIZE: read_detokenize,
}
READ = _READ | {alias: _READ[path] for alias, path in ALIASES.items()}
"""Route -> what reads its body. Large bodies of these routes are checked in a process of their own."""


def answer_check(path: str, body: bytes, limits: Sequence[int | None], changed: mmap | bytearray) -> dict[str, Any]:
    """Check a body; return what `LargeBodyReader` gets.

    Args:
        path: a key of `READ`.
        body: JSON.
        limits: `PromptLimits`.
        changed: as long as the body; gets the body without the values of fields that have no effect, if there are any.
    """
    try:
        data = parse(body)
        request = READ[path](data, PromptLimits._make(limits))
    except ApiError as error:
        return _error(error, None)
    except InvalidBody as refused:
        return _error(refused.error, dict(refused.fields))
    shorter = _without_unread(data, request, len(body))
    if shorter is not None:
        changed[: len(shorter)] = shorter
    return {"size": None if shorter is None else len(shorter), "value_bytes": object_bytes(shorter or body)}


def _error(error: ApiError, fields: dict[str, Any] | None) -> dict[str, Any]:
    return {"error": (error.status, error.message, error.param, error.code), "fields": fields}


def _without_unread(data: dict[str, Any], request: RequestBody, most: int) -> bytes | None:
    """Return JSON of a body whose fields without effect are null, and are named in the answer all the same; None if no
    such field has a value of any size, or if it would have more than `most` bytes.
    """
    unread = [name for name in unknown_fields(request) if isinstance(data[name], (str, list, dict))]
    if not unread:
        return None
    try:
        text = json.dumps(data | dict.fromkeys(unread), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        shorter = text.encode()
    except ValueError:  # a number that JSON cannot have, or one of thousands of digits: read again, it is the same
        return None
    return shorter if len(shorter) <= most else None
