"""Requests about tokens: a text or a conversation to turn into token ids, and token ids to turn into text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inferplane.serving.admission import PromptLimits
from inferplane.serving.chat.request import MAX_TOOLS, ConversationRequest, Tool
from inferplane.serving.chat_template.fields import TemplateFields
from inferplane.serving.errors import invalid
from inferplane.serving.wire import AtMost, RequestBody, TokenId, any_given, validate


class TokenizeRequest(TemplateFields, ConversationRequest):
    """A text or a conversation to turn into token ids."""

    model_config = ConfigDict(**RequestBody.model_config, json_schema_extra=any_given("prompt", "messages"))

    model: str | None = Field(None, max_length=4096)
    prompt: str | None = None
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to turn into text."""

    model: str | None = Field(None, max_length=4096)
    tokens: Annotated[list[TokenId], AtMost()]


def read_tokenize(data: dict[str, Any], limits: PromptLimits) -> TokenizeRequest:
    """Return a body's fields as a request; raise ApiError 400 that names the first wrong one."""
    return validate(TokenizeRequest, data)


def read_detokenize(data: dict[str, Any], limits: PromptLimits) -> DetokenizeRequest:
    """Return a body's fields as a request; raise ApiError 400 that names the first wrong one, or for more tokens than
    a sequence has, before anything looks at them.
    """
    given, longest = data.get("tokens"), limits.max_model_len
    if isinstance(given, list) and len(given) > longest:
        message = f"{len(given)} tokens; a sequence has at most {longest}."
        raise invalid(message, "tokens", "context_length_exceeded")
    return validate(DetokenizeRequest, data)
