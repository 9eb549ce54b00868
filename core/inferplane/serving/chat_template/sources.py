"""Chat templates that come from elsewhere than the checkpoint: from the server's settings, and from requests.

Sources: vLLM's `--chat-template` and `--trust-request-chat-template`, https://docs.vllm.ai/en/latest/cli/serve.html.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from inferplane.dialogue.render import compile_template, describe_syntax_error
from inferplane.dialogue.template import is_template_source
from inferplane.errors import UsageError
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.errors import invalid

MAX_CHARACTERS = 2**18
"""Most characters of a template: the longest of published checkpoints have some 30,000."""
MAX_TEMPLATES = 4
"""Most templates of requests whose processes wait for the next conversation, and most that render at a time."""


def read_template(given: str) -> str:
    """Return the source of a chat template.

    Args:
        given: the name of a file that holds it, or the template itself: what has a brace or a line end is none.

    Raises:
        UsageError: the file cannot be read, or the template does not compile.
    """
    source = given
    if not any(character in given for character in "{}\n"):
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "pass the name of a file with a Jinja template, or the template itself"
            raise UsageError(f"The chat template {given} cannot be read ({error}).", remedy=remedy) from error
    if len(source) > MAX_CHARACTERS:
        raise UsageError(
            f"The chat template has {len(source)} characters.", there_is=f"templates of at most {MAX_CHARACTERS}"
        )
    _check(source)
    return source


def _check(source: str) -> None:
    from jinja2 import TemplateError

    try:
        compile_template(source)
    except (TemplateError, RecursionError) as error:
        raise UsageError(
            describe_syntax_error(error), remedy="mend it: it is a Jinja template as transformers renders them"
        ) from error


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
