"""Requests for OpenAI's chat completions.

Source: https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from inferplane.dialogue.messages import MAX_NAME_CHARACTERS
from inferplane.serving.chat_template.fields import TemplateFields
from inferplane.serving.constraints.fields import Constrained
from inferplane.serving.request_fields import Refused
from inferplane.serving.wire import (
    MAX_MESSAGES,
    Alternatives,
    AtMost,
    Count,
    DescribedBy,
    FunctionName,
    JsonObject,
    RequestBody,
    RequestObject,
    read_messages,
)

MAX_TOOLS, MAX_MODALITIES = 128, 8


class TextPart(JsonObject):
    """A part of a message. Images and sound are not supported."""

    type: Literal["text"]
    text: str


class NamedFunction(RequestObject):
    """The name of a function, which may be one that must be called."""

    name: FunctionName


class RefusalPart(JsonObject):
    """A part of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class EarlierFunction(JsonObject):
    """A function that an earlier answer called; its arguments are JSON text, which may be empty or cut off, or data."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    arguments: str | dict[str, Any] | None = None


class EarlierCall(JsonObject):
    """A call in a message."""

    id: str | None = Field(None, max_length=MAX_NAME_CHARACTERS)
    type: Literal["function"] = "function"
    function: EarlierFunction


class Message(JsonObject):
    """One message of the conversation. Any order of roles is accepted here; the model's template may refuse it.

    This describes messages; `normalize_messages` checks them. It passes other keys to the template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = Field(
        None, description="Required in a message without tool_calls."
    )
    name: str | None = Field(None, max_length=MAX_NAME_CHARACTERS)
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = Field(None, max_length=MAX_NAME_CHARACTERS)


Messages = Annotated[list[Annotated[Any, DescribedBy(Message)]], Field(min_length=1), AtMost(MAX_MESSAGES)]


class Function(NamedFunction):
    """A function that may be called."""

    refused = dict.fromkeys(("schema", "input_schema", "json_schema"), Refused("parameters"))
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestObject):
    """A tool; every tool is a function."""

    refused = {name: Refused(f"function.{name}") for name in ("parameters", "strict")}
    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The tool as the client wrote it, which is what templates get: with its order of keys, and its nulls."""
        return self._given

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        found: Tool = handler(data)
        if isinstance(data, dict):
            found._given = data
        return found


class NamedTool(RequestObject):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ConversationRequest(RequestBody):
    """A request with messages, which are normalized once all other fields have been checked."""

    messages: Messages | None = None

    @model_validator(mode="after")
    def _normalize(self) -> ConversationRequest:
        if self.messages is not None:
            self.messages = read_messages(self.messages)
        return self


class ChatRequest(Constrained, TemplateFields, ConversationRequest):
    """A conversation to be answered."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Add the model's special tokens around the conversation.")
    modalities: Annotated[list[Literal["text"]], AtMost(MAX_MODALITIES)] | None = None
