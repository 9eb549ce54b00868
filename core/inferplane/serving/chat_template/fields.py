"""Fields of a request that are for the model's chat template, under the names of vLLM, SGLang and OpenAI.

Source: https://docs.vllm.ai, "OpenAI-Compatible Server", chat API; `apply_chat_template` of transformers.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from inferplane.dialogue.messages import KEYS
from inferplane.dialogue.template import Template
from inferplane.serving.chat_template.sources import MAX_CHARACTERS
from inferplane.serving.errors import invalid
from inferplane.serving.request_fields import MAX_UNKNOWN
from inferplane.serving.wire import AtMost, RequestBody

MAX_VARIABLES, MAX_DOCUMENTS = 64, 1024
RESERVED = ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message")
"""Variables and options that have fields of their own, or that a request cannot set."""


class TemplateVariables(NamedTuple):
    """What a request passes to the template beside its conversation.

    Args:
        values: variables by name.
        ignored: fields that the template does not read.
        mark: follows the text that is to be continued; "" if the reply is a new message.
    """

    values: Mapping[str, Any]
    ignored: Sequence[str] = ()
    mark: str = ""

    def mark_last(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages, the last one with the mark behind its text; raise ApiError 400 if it has no text."""
        if not self.mark:
            return messages
        last = messages[-1]
        if not isinstance(last.get("content"), str) or last.get("tool_calls"):
            raise invalid("The last message has no text to continue.", "continue_final_message")
        return [*messages[:-1], {**last, "content": f"{last['content']}{self.mark} "}]

    def truncate_at_mark(self, text: str) -> str:
        """Return a rendered conversation up to the mark, without it; raise ApiError 400 if the template left it out.

        A template that removes the space behind the mark would have removed spaces at the end of the message.
        """
        if not self.mark:
            return text
        before, mark, after = text.rpartition(self.mark)
        if not mark:
            raise invalid("The chat template does not show the last message.", "continue_final_message")
        return before if after.startswith(" ") else before.rstrip()


class TemplateFields(RequestBody):
    """How the model's template renders a conversation."""

    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_VARIABLES)] | None = Field(
        None, description="Variables for the chat template."
    )
    add_generation_prompt: bool | None = Field(None, description="End with the beginning of a reply: the default.")
    continue_final_message: bool | None = Field(None, description="Continue the last message in place of a reply.")
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)] | None = Field(
        None, description="A template in place of the model's, if the server's settings allow it."
    )
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    documents: Annotated[list[dict[str, Any]], AtMost(MAX_DOCUMENTS)] | None = Field(
        None, description="Texts for a template that shows them."
    )

    def template_variables(self, template: Template | None) -> TemplateVariables:
        """Return what the template gets.

        Args:
            template: the model's.

        Raises:
            ApiError: 400, fields exclude each other, or the template does not read one that changes the answer.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
            )
        values: dict[str, Any] = {}
        for name in ("reasoning_effort", "documents"):
            value = getattr(self, name)
            if value and not _is_read(template, name):
                raise invalid(f"{name}: The model's chat template does not read it.", name, "unsupported")
            if value:
                values[name] = value
        given = self.chat_template_kwargs or {}
        for name in given:
            if name in RESERVED:
                raise invalid(f"chat_template_kwargs cannot set {name}.", f"chat_template_kwargs.{name}")
        values.update(given)
        values["add_generation_prompt"] = not self.continue_final_message and self.add_generation_prompt is not False
        ignored = [f"chat_template_kwargs.{name}" for name in sorted(given) if not _is_read(template, name)]
        return TemplateVariables(values, ignored, uuid.uuid4().hex if self.continue_final_message else "")


def _is_read(template: Template | None, name: str) -> bool:
    """Return whether a template names a variable."""
    sources = "" if template is None else f"{template.source} {template.tool_source or ''}"
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sources) is not None


def list_unread_keys(messages: Sequence[Mapping[str, Any]], template: Template | None) -> list[str]:
    """Return the paths of keys of messages, one for each key, that are unknown and that the template does not read.

    Args:
        messages: of `normalize_messages`.
        template: the model's.
    """
    found: dict[str, str] = {}
    read: set[str] = set(KEYS)
    for i, message in enumerate(messages):
        for key in message:
            if key in read or key in found:
                continue
            if template is not None and template.reads(key):
                read.add(key)
            else:
                found[key] = f"messages[{i}].{key}"
        if len(found) > MAX_UNKNOWN:
            break
    return list(found.values())
