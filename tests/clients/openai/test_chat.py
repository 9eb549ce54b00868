"""OpenAI's client with a model that thinks and calls: reasoning, streamed arguments, typed parsing, a whole loop."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

THOUGHT = "The last message decides what is to do."
HELLO = [{"role": "user", "content": "Hello"}]
OSLO = [{"role": "user", "content": "What is the weather in Oslo?"}]
BOTH = [{"role": "user", "content": "What is the weather in Oslo and Rome?"}]
JOKE = [{"role": "user", "content": "Tell me a joke about cats."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}},
            "required": ["location"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Joke(BaseModel):
    """A joke as data."""

    setup: str
    punchline: str


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def ask(api: openai.OpenAI, messages: Any, **more: Any) -> Any:
    return api.chat.completions.create(model="scripted", messages=messages, temperature=0, **more)


def test_a_thought_is_apart_from_the_answer(api):
    done = ask(api, HELLO)
    message = done.choices[0].message
    assert message.content == "Hello! How may I help you?"
    assert message.reasoning_content.strip() == message.reasoning.strip() == THOUGHT
    assert 0 < done.usage.completion_tokens_details.reasoning_tokens < done.usage.completion_tokens


def test_a_streamed_thought_comes_before_the_answer(api):
    thought, answer, usage = "", "", None
    for chunk in ask(api, HELLO, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = getattr(choice.delta, "reasoning_content", None) or ""
            assert not piece or not answer, "the thought comes first"
            thought += piece
            answer += choice.delta.content or ""
    assert (thought.strip(), answer) == (THOUGHT, "Hello! How may I help you?")
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_thinking_is_turned_off_by_the_template(api):
    message = ask(api, HELLO, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert message.content == "Hello! How may I help you?"
    assert not getattr(message, "reasoning_content", None)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_arguments_arrive_in_pieces(api, choice):
    calls: dict[int, dict[str, Any]] = {}
    pieces, reason = 0, None
    for chunk in ask(api, OSLO, tools=[WEATHER], tool_choice=choice, stream=True):
        delta = chunk.choices[0].delta
        reason = chunk.choices[0].finish_reason or reason
        assert not (delta.content or "").strip()
        for call in delta.tool_calls or ():
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            known["arguments"] += call.function.arguments or ""
            pieces += bool(call.function.arguments)
    (call,) = calls.values()
    assert call["name"] == "get_weather" and call["id"] and json.loads(call["arguments"]) == {"location": "Oslo"}
    assert pieces > 2, "not in one piece at the end"
    assert reason in ("tool_calls", "stop")


def test_a_whole_loop_with_two_calls_at_once(api):
    message = ask(api, BOTH, tools=[WEATHER]).choices[0].message
    assert [json.loads(call.function.arguments)["location"] for call in message.tool_calls] == ["Oslo", "Rome"]
    assert message.reasoning_content.strip() == THOUGHT
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls]
    last = ask(api, [*BOTH, message.model_dump(exclude_none=True), *results], tools=[WEATHER]).choices[0]
    assert (last.message.content, last.finish_reason) == ("Both have sun: 12 degrees; 12 degrees.", "stop")


def test_typed_parsing(api):
    done = api.chat.completions.parse(model="scripted", messages=JOKE, response_format=Joke)
    assert done.choices[0].message.parsed.setup == "Why do cats like keyboards?"
    tool = openai.pydantic_function_tool(Joke, name="Joke")
    done = api.chat.completions.parse(model="scripted", messages=JOKE, tools=[tool], tool_choice="required")
    (call,) = done.choices[0].message.tool_calls
    assert call.function.parsed_arguments.punchline.startswith("Because")


def test_the_helper_for_streams(api):
    with api.chat.completions.stream(model="scripted", messages=JOKE, response_format=Joke) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.parsed.punchline.startswith("Because")
    assert events.count("content.done") == 1 and "content.delta" in events
    tool = openai.pydantic_function_tool(Joke, name="Joke")
    with api.chat.completions.stream(model="scripted", messages=JOKE, tools=[tool], tool_choice="required") as stream:
        events = [event.type for event in stream]
    assert events.count("tool_calls.function.arguments.done") == 1
    assert events.count("tool_calls.function.arguments.delta") > 2
