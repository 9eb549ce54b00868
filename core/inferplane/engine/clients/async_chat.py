"""`AsyncLLM.chat`: the reply to a conversation, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from inferplane.dialogue.messages import normalize_messages
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import Delta


async def stream_reply(
    llm: Any, messages: Any, params: SamplingParams | None = None, request_id: Any = None, **options: Any
) -> AsyncIterator[Delta]:
    """The reply to a conversation, which the checkpoint's own chat template turns into a prompt.

    Args:
        llm: the `AsyncLLM`.
        messages: as for `LLM.chat`.
        params: how to sample.
        request_id: for `abort`; unique among live requests. None: one of its own.
        options: the other arguments of `AsyncLLM.generate`.

    Raises:
        UsageError: no chat template, or it refuses the messages, or these are not valid. Otherwise as `generate`.
    """
    ids = await asyncio.to_thread(lambda: llm.tokenizer.chat(normalize_messages(messages)))
    async with aclosing(llm.generate(ids, params, request_id, **options)) as pieces:
        async for piece in pieces:
            yield piece
