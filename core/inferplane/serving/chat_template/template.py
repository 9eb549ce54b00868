"""Chat templates for the server: rendered in a process of their own (`inferplane.dialogue.renderer`), awaited here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inferplane.confined import MEASURES
from inferplane.dialogue.renderer import RENDER_S, Renderer, RenderError
from inferplane.dialogue.template import Messages, Template, describe_refusal, forms
from inferplane.serving.errors import ApiError, invalid

log = logging.getLogger("inferplane.serving")


class ChatTemplate:
    """A model's chat template.

    Args:
        source: the Jinja template.
        tokens: special tokens by their names in templates.
        tool_source: another template for conversations with tools; None: `source` renders them too.
        render_s: most seconds for one conversation.
        field: of requests, which errors name if the template is at fault.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, Any],
        tool_source: str | None = None,
        render_s: float = RENDER_S,
        field: str = "messages",
    ) -> None:
        self.facts = Template(source, tokens, tool_source)
        self._plain = _Worker(source, tokens, render_s, field)
        self._with_tools = _Worker(tool_source, tokens, render_s, field) if tool_source is not None else self._plain

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatTemplate | None:
        """Return the template of a tokenizer of transformers; None if it has none."""
        return cls.of(Template.from_tokenizer(tokenizer))

    @classmethod
    def of(cls, facts: Template | None) -> ChatTemplate | None:
        """Return what renders a template; None for None."""
        return cls(facts.source, facts.tokens, facts.tool_source) if facts is not None else None

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation, ready for the reply.

        Args:
            messages: the conversation.
            tools: of the request.
            variables: further variables of the template; `add_generation_prompt` False leaves out the beginning of the
                reply.

        Raises:
            ApiError: the template refuses it, takes too long, or its result is too long.
        """
        given = {**(variables or {}), "messages": list(messages), "tools": list(tools) if tools else None}
        return await (self._with_tools if tools else self._plain).render(given)

    async def close(self) -> None:
        """Kill the processes."""
        await self._plain.close()
        await self._with_tools.close()


async def render_conversation(
    template: ChatTemplate | None,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    description: str = "",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation in the first form that a template accepts.

    Args:
        template: None: the model has none.
        messages: of `normalize_messages`.
        tools: of the request.
        description: of the tools, for a template that does not support them.
        variables: further variables of the template.

    Raises:
        ApiError: the template refuses the conversation in every form, takes too long, or there is none.
    """
    if template is None:
        message = "This model has no chat template; use /v1/completions with a prompt of your own."
        raise invalid(message, "messages", "no_chat_template")
    refusal = None
    for plain in forms(template.facts, messages, description):
        try:
            return await template.render(plain, tools, variables)
        except ApiError as error:
            if error.code in ("too_slow", "template_failed"):  # in any form
                raise
            refusal = refusal or error
    assert refusal is not None
    raise refusal


class _Worker:
    """A thread that renders one conversation after the other; one whose client has left is finished, too."""

    def __init__(self, source: str, tokens: Mapping[str, Any], render_s: float, field: str) -> None:
        self._field = field
        self.renderer = Renderer(source, tokens, render_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inferplane-template")
        self._is_reported = False

    async def render(self, given: Mapping[str, Any]) -> str:
        try:
            return await self._render(given)
        except RenderError as error:
            if error.reason == "refused":
                raise invalid(describe_refusal(error.message), "messages") from error
            raise invalid(error.message, self._field, error.reason) from error

    async def _render(self, given: Mapping[str, Any]) -> str:
        text = await asyncio.get_running_loop().run_in_executor(self._thread, self.renderer.render, given)
        if not self._is_reported and (process := self.renderer.process) is not None:
            self._is_reported = True
            missing = [name for name in MEASURES if name not in process.measures]
            facts = {"pid": process.pid, "confined_by": " ".join(process.measures), "missing": " ".join(missing)}
            log.log(logging.WARNING if missing else logging.DEBUG, "templates are rendered", extra={"facts": facts})
        return text

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.renderer.close)
