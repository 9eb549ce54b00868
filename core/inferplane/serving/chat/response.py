"""Answers of OpenAI's chat completions: what they contain.

Source: https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inferplane.serving.chat.request import NamedFunction
from inferplane.serving.wire import GeneratedResponse, JsonObject


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


class CalledFunction(NamedFunction):
    """A function that the model called."""

    arguments: str


class ToolCall(JsonObject):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledInput(JsonObject):
    """A custom tool that the model called."""

    name: str
    input: str


class CustomToolCall(JsonObject):
    """A call of a custom tool in an answer."""

    id: str
    type: Literal["custom"]
    custom: CalledInput


class AnswerMessage(JsonObject):
    """The message that the model wrote."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="The thought, of a model that thinks.")
    reasoning: str | None = Field(None, description="As reasoning_content.")
    tool_calls: list[ToolCall | CustomToolCall] | None = None


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
