"""The model as clients see it: its names, its tokenizer, its chat template."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane import __version__
from inferplane.dialogue.replies.catalog import FORMS, choose_form, find_form
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.template import Template
from inferplane.dialogue.template_files import read_template
from inferplane.engine.sampling.spans.token_text import TokenText
from inferplane.errors import UsageError
from inferplane.serving.chat_template.sources import RequestTemplates
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.errors import ApiError
from inferplane.serving.settings import ServerSettings

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM

MAX_FORMS = 64
"""Most templates whose form of replies is remembered."""
DEFAULT_NAME = "default"
"""A name that every server accepts."""


class ServedModel:
    """What the wire formats need to know of the model. Its methods may be called from any thread.

    Args:
        engine: runs it.
        settings: how it is served.

    Raises:
        CheckpointError: its tokenizer cannot be loaded.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.info = engine.info
        self.created = int(time.time())
        folder_name = Path(self.info.name).name or self.info.name
        self.names = settings.served_model_name or (folder_name,)
        self._aliases = () if settings.served_model_name else (self.info.name,)
        self._tokenizer = engine.tokenizer if self.info.folder is not None else None
        self.token_text = TokenText(self._tokenizer.fast) if self._tokenizer is not None else None
        tokens = dict(self._tokenizer.fast.special_tokens_map) if self._tokenizer is not None else {}
        self.template = self._own_template(settings, tokens)
        self.can_constrain = self._tokenizer is not None and find_spec("llguidance") is not None
        self.special_tokens = self._tokenizer.special_tokens if self._tokenizer is not None else {}
        self._parsers = settings.reasoning_parser, settings.tool_call_parser
        self._forms: dict[str | None, ReplyForm] = {}
        self._request_templates = RequestTemplates(tokens, settings.trust_request_chat_template)
        facts = (__version__, self.info.name, self.info.dtype, self.info.kv_cache_dtype, self.info.device)
        self.fingerprint = f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:10]}"

    def _own_template(self, settings: ServerSettings, tokens: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the template of the settings, else the checkpoint's; None without a tokenizer or a template."""
        if self._tokenizer is None:
            return None
        if settings.chat_template is not None:
            return ChatTemplate(read_template(settings.chat_template), tokens)
        return ChatTemplate.from_tokenizer(self._tokenizer.fast)

    def resolve_name(self, name: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ApiError: 404, it is another model's name.
        """
        if name is None or name in (DEFAULT_NAME, ""):
            return self.names[0]
        if name not in (*self.names, *self._aliases):
            there = ", ".join((*self.names, DEFAULT_NAME))
            message = f"The model {name[:200]!r} is not served here. There is: {there}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def _require_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise UsageError("This model has no tokenizer.", remedy="pass token ids")
        return self._tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            UsageError: the text is no valid Unicode, or there is no tokenizer.
        """
        return list(self._require_tokenizer().encode(text, special=special))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids; special tokens are left out unless `special`.

        Raises:
            UsageError: there is no tokenizer.
        """
        tokenizer = self._require_tokenizer()
        if special:
            return str(tokenizer.fast.decode(list(ids), clean_up_tokenization_spaces=False))
        return str(tokenizer.decode(ids))

    def token_name(self, token: int) -> str:
        """Return a token's text for people; its number without a tokenizer."""
        return self.token_text.name_of(token) if self.token_text is not None else str(token)

    def describe_tokenizer(self) -> dict[str, Any]:
        """Return what a client has to know to prepare prompts by itself: the tokenizer's class, its special tokens as
        text (None: there is none) and the chat template.

        Raises:
            UsageError: there is no tokenizer.
        """
        fast = self._require_tokenizer().fast
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(fast).__name__,
            **{name: getattr(fast, name, None) for name in names},
            "model_max_length": self.info.max_model_len,
            "chat_template": self.template.facts.source if self.template is not None else None,
        }

    def reply_form(self, template: Template | None) -> ReplyForm:
        """Return how the model writes thoughts and calls, as the settings say, or else its template and family.

        Args:
            template: the model's, or a request's; None: there is none.
        """
        source = None if template is None else template.all_sources
        if source not in self._forms:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            forms = (*self.info.reply_forms, *FORMS)
            self._forms[source] = choose_form(find_form(source, self.info.model_type, forms), *self._parsers, forms)
        return self._forms[source]

    @asynccontextmanager
    async def use_template(self, source: str | None = None) -> AsyncIterator[ChatTemplate | None]:
        """Lend a chat template: the model's, None if it has none, or one that a request brings.

        Raises:
            ApiError: 400, requests may not bring templates.
        """
        if source is None:
            yield self.template
        else:
            async with self._request_templates.use(source) as template:
                yield template

    async def close(self) -> None:
        """End the processes that render templates."""
        if self.template is not None:
            await self.template.close()
        await self._request_templates.close()
