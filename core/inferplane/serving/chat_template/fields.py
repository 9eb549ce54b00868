"""Fields of a request that are for the model's chat template, under the names of vLLM, SGLang and OpenAI.

Source: https://docs.vllm.ai, "OpenAI-Compatible Server", chat API; `apply_chat_template` of transformers.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from inferplane.dialogue.continuation import mark_last, truncate_at_mark
from inferplane.dialogue.messages import KEYS, MessageError
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.template import RESERVED, SWITCHES, Template
from inferplane.dialogue.template_files import MAX_CHARACTERS
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.request_fields import MAX_UNKNOWN
from inferplane.serving.wire import MAX_TOKENS, AtMost, RequestBody, RequestObject

MAX_VARIABLES, MAX_DOCUMENTS = 64, 1024


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
        try:
            return mark_last(messages, self.mark)
        except MessageError as error:
            raise invalid(error.what, error.param) from error

    def truncate_at_mark(self, text: str) -> str:
        """Return a rendered conversation up to the mark, without it; raise ApiError 400 if the template left it out."""
        try:
            return truncate_at_mark(text, self.mark)
        except MessageError as error:
            raise invalid(error.what, error.param) from error


class Thinking(RequestObject):
    """Whether the model thinks, as Anthropic, DeepSeek and GLM have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="As thinking_token_budget, in a chat."
    )


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
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description='How much the model thinks; "none": not at all.'
    )
    enable_thinking: bool | None = Field(None, description="Whether the model thinks, if its template can tell it.")
    thinking: bool | Thinking | None = Field(None, description="As enable_thinking.")
    documents: Annotated[list[dict[str, Any]], AtMost(MAX_DOCUMENTS)] | None = Field(
        None, description="Texts for a template that shows them."
    )

    def template_variables(self, template: Template | None, form: ReplyForm | None = None) -> TemplateVariables:
        """Return what the template gets.

        Args:
            template: the model's.
            form: how the model writes thoughts; None: that is not known.

        Raises:
            ApiError: 400, fields exclude each other, or the template does not read one that changes the answer.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
            )
        values, ignored = self._thinking_variables(template, form)
        if self.documents:
            if not _is_read(template, "documents"):
                raise _make_refusal("documents")
            values["documents"] = self.documents
        given = self.chat_template_kwargs or {}
        for name in given:
            if name in RESERVED:
                raise invalid(f"chat_template_kwargs cannot set {name}.", f"chat_template_kwargs.{name}")
        values.update(given)
        values["add_generation_prompt"] = not self.continue_final_message and self.add_generation_prompt is not False
        ignored += [f"chat_template_kwargs.{name}" for name in sorted(given) if not _is_read(template, name)]
        return TemplateVariables(values, ignored, uuid.uuid4().hex if self.continue_final_message else "")

    def _thinking_variables(
        self, template: Template | None, form: ReplyForm | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the variables that say whether and how much the model thinks, and the fields without effect."""
        switches = [name for name in SWITCHES if _is_read(template, name)]
        effort, values = self.reasoning_effort or None, dict[str, Any]()
        field, thinks = self._read_switch()
        if effort == "none" and not switches and form is not None and form.uses_channels:
            message = 'reasoning_effort: The model thinks at any effort, of which "low" is the least.'
            raise invalid(message, "reasoning_effort", "unsupported")
        if effort is not None and _is_read(template, "reasoning_effort") and (effort != "none" or not switches):
            values["reasoning_effort"] = effort
        elif effort is not None and field is None:
            field, thinks = "reasoning_effort", effort != "none"
        if field is None:
            return values, []
        if switches:
            is_exact = effort is None or "reasoning_effort" in values or (effort == "none" and not thinks)
            return {**dict.fromkeys(switches, thinks), **values}, [] if is_exact else ["reasoning_effort"]
        if form is not None and form.reasoning is not None and not thinks:
            raise _make_refusal(field)
        return values, [field]

    def _read_switch(self) -> tuple[str | None, bool]:
        """Return the field that turns thinking on or off, None if none does, and whether it is on."""
        if self.enable_thinking is not None:
            return "enable_thinking", self.enable_thinking
        if isinstance(self.thinking, Thinking):
            return "thinking", self.thinking.type != "disabled"
        return (None, True) if self.thinking is None else ("thinking", self.thinking)


def _make_refusal(field: str) -> ApiError:
    return invalid(f"{field}: The model's chat template does not read it.", field, "unsupported")


def _is_read(template: Template | None, name: str) -> bool:
    return template is not None and template.reads_variable(name)


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
