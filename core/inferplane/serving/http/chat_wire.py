"""OpenAI's chat completions as data.

Source: https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from inferplane.serving.http.constraints import Constrained
from inferplane.serving.wire import Alternatives, Count, FunctionName, GeneratedResponse, JsonObject

MAX_MESSAGES, MAX_TOOLS, MAX_PARTS = 2048, 128, 1024


class TextPart(JsonObject):
    """A part of a message. Images and sound are not supported."""

    type: Literal["text"]
    text: str


class NamedFunction(JsonObject):
    """The name of a function, which may be one that must be called."""

    name: FunctionName


class CalledFunction(NamedFunction):
    """A function that an earlier answer called."""

    arguments: str


class ToolCall(JsonObject):
    """A call in a message."""

    id: str = Field(max_length=256)
    type: Literal["function"]
    function: CalledFunction


class Message(JsonObject):
    """One message of the conversation. Any order of roles is accepted here; the model's template may refuse it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)


class Function(NamedFunction):
    """A function that may be called."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(JsonObject):
    """A tool; every tool is a function."""

    type: Literal["function"]
    function: Function


class NamedTool(JsonObject):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Constrained):
    """A conversation to be answered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = Field(None, description="Not supported.")
    functions: None = Field(None, description="Not supported: use tools.")
    function_call: None = Field(None, description="Not supported: use tool_choice.")
    web_search_options: None = Field(None, description="Not supported.")


class TopLogprob(JsonObject):
    """A token and its log-probability; `bytes` are the token's own: it may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenInfo(TopLogprob):
    """A token of the answer with the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(JsonObject):
    """Log-probabilities of an answer."""

    content: list[TokenInfo] | None


class AnswerMessage(JsonObject):
    """The message that the model wrote."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(JsonObject):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatResponse(GeneratedResponse):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
