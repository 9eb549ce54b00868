"""Chat templates that requests bring.

Source: vLLM's `--trust-request-chat-template`, https://docs.vllm.ai/en/latest/cli/serve.html.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from inferplane.dialogue.template import is_template_source
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.errors import invalid

MAX_TEMPLATES = 4
"""Most templates of requests whose processes wait for the next conversation, and most that render at a time."""


class RequestTemplates:
    """The templates of requests. Each has a process of its own: a template is a program, and what it is given is the
    conversation of its own sender alone.

    Args:
        tokens: special tokens of the model by their names in templates.
        are_allowed: requests may bring templates.
    """

    def __init__(self, tokens: Mapping[str, Any], are_allowed: bool) -> None:
        self._tokens, self._are_allowed = tokens, are_allowed
        self._idle: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._running = asyncio.Semaphore(MAX_TEMPLATES)

    @asynccontextmanager
    async def use(self, source: str) -> AsyncIterator[ChatTemplate]:
        """Lend the template with a source, which one request at a time uses.

        Raises:
            ApiError: 400, requests may not bring templates, or this is none.
        """
        if not self._are_allowed:
            message = "chat_template: Not allowed: the server's setting trust_request_chat_template is off."
            raise invalid(message, "chat_template", "unsupported")
        if not is_template_source(source):
            message = (
                "chat_template: No Jinja template: it has neither {{ nor {%; pass the template's text, not the name "
                "of a file."
            )
            raise invalid(message, "chat_template")
        async with self._running:
            template = self._idle.pop(source, None) or ChatTemplate(source, self._tokens, field="chat_template")
            try:
                yield template
            finally:
                replaced = self._idle.pop(source, None)
                self._idle[source] = template
                beyond = self._idle.popitem(last=False)[1] if len(self._idle) > MAX_TEMPLATES else None
                for old in (replaced, beyond):
                    if old is not None:
                        await old.close()

    async def close(self) -> None:
        """Kill the processes."""
        while self._idle:
            await self._idle.popitem()[1].close()
