"""Requests for OpenAI's chat completions.

Source: https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from inferplane.dialogue.messages import MAX_NAME_CHARACTERS
from inferplane.serving.chat.thinking import ThinkingFields
from inferplane.serving.constraints.fields import Constrained
from inferplane.serving.request_fields import Refused
from inferplane.serving.wire import (
    MAX_MESSAGES,
    UNTYPED,
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


class EarlierInput(JsonObject):
    """A custom tool that an earlier answer called."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    input: str


class EarlierCall(JsonObject):
    """A call in a message: it has `function`, or `custom`."""

    id: str | None = Field(None, max_length=MAX_NAME_CHARACTERS)
    type: Literal["function", "custom"] = "function"
    function: EarlierFunction | None = None
    custom: EarlierInput | None = None


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


class FunctionTool(RequestObject):
    """A function as a tool."""

    refused = {name: Refused(f"function.{name}") for name in ("parameters", "strict")}
    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    @property
    def given(self) -> dict[str, Any]:
        """The tool as the client wrote it, which is what templates get: with its order of keys, and its nulls."""
        return self._given

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler[FunctionTool]) -> FunctionTool:
        found: FunctionTool = handler(data)
        if isinstance(data, dict):
            found._given = data
        return found


class GrammarFormat(RequestObject):
    """A grammar of a custom tool's input: llguidance's dialect of Lark, or a regular expression in Rust's syntax."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class TextInput(RequestObject):
    """Any text."""

    type: Literal["text"]


class GrammarInput(RequestObject):
    """Text that follows a grammar."""

    type: Literal["grammar"]
    grammar: GrammarFormat


class Custom(NamedFunction):
    """A custom tool: it takes one text."""

    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type"), UNTYPED] | None = None

    @property
    def grammar(self) -> GrammarFormat | None:
        """The grammar of its input; None for any text."""
        return self.format.grammar if isinstance(self.format, GrammarInput) else None


class CustomTool(RequestObject):
    """A custom tool as a tool."""

    type: Literal["custom"]
    custom: Custom

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type"), UNTYPED]


class NamedTool(RequestObject):
    """A function that must or may be called."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name


class NamedCustomTool(RequestObject):
    """A custom tool that must or may be called."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name


class AllowedChoice(RequestObject):
    """Which tools may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Field(min_length=1), AtMost(MAX_TOOLS)]


class AllowedTools(RequestObject):
    """Some of the tools. The model is shown all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedChoice


class ConversationRequest(RequestBody):
    """A request with messages, which are normalized once all other fields have been checked."""

    messages: Messages | None = None

    @model_validator(mode="after")
    def _normalize(self) -> ConversationRequest:
        if self.messages is not None:
            self.messages = read_messages(self.messages)
        return self


class ChatRequest(Constrained, ThinkingFields, ConversationRequest):
    """A conversation to be answered."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Add the model's special tokens around the conversation.")
    modalities: Annotated[list[Literal["text"]], AtMost(MAX_MODALITIES)] | None = None
