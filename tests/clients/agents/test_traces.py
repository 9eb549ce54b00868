"""What agents send, written from the published references of the interfaces that they use: whole conversations with
tools, in the spellings of OpenAI, DeepSeek, Mistral, vLLM and of clients that send back what they have received.

Sources: https://platform.openai.com/docs/guides/function-calling, .../docs/api-reference/chat,
https://api-docs.deepseek.com/guides/reasoning_model, https://docs.vllm.ai/en/latest/features/tool_calling.html,
https://docs.mistral.ai/capabilities/function_calling, https://openrouter.ai/docs/use-cases/reasoning-tokens.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

THOUGHT = "The last message decides what is to do."
PARAMETERS = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "A place."}},
    "required": ["location"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STRICT = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "strict": True,
        "parameters": {**PARAMETERS, "additionalProperties": False},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "my_adder_tool",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
OSLO = {"role": "user", "content": "What is the weather in Oslo?"}
BOTH = {"role": "user", "content": "What is the weather in Oslo and Rome?"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant with tools."}


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": messages, "temperature": 0, **fields}
    done = client.post("/v1/chat/completions", json=body)
    assert done.status_code == 200, done.text
    ChatCompletion.model_validate(done.json())
    return done.json()["choices"][0]


def read_stream(client: httpx.Client, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """The message and the finish reason that an agent puts together from a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    body = {"model": "default", "messages": messages, "temperature": 0, "stream": True, **fields}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            ChatCompletionChunk.model_validate_json(data)
            for choice in json.loads(data)["choices"]:
                delta = choice["delta"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(message["tool_calls"]):
                        begun = {"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                        message["tool_calls"].append(begun)
                    known = message["tool_calls"][call["index"]]["function"]
                    known["name"] += call["function"].get("name") or ""
                    known["arguments"] += call["function"].get("arguments") or ""
    assert len(reasons) == 1
    return {"message": message, "finish_reason": reasons[0]}


def arguments(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]


@pytest.mark.parametrize("read", [ask, read_stream], ids=["whole", "stream"])
@pytest.mark.parametrize("tools", [[WEATHER], [STRICT], [ADD, STRICT]], ids=["plain", "strict", "two"])
def test_a_loop_of_calls_and_results(client, read, tools):
    messages = [SYSTEM, BOTH]
    turn = read(client, messages, tools=tools, tool_choice="auto", parallel_tool_calls=True)
    message = turn["message"]
    assert turn["finish_reason"] == "tool_calls"
    assert arguments(message) == [("get_weather", {"location": "Oslo"}), ("get_weather", {"location": "Rome"})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert message["reasoning_content"].strip() == THOUGHT
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": c["id"], "content": "sun"} for c in message["tool_calls"]]
    turn = read(client, messages, tools=tools)
    assert (turn["message"]["content"], turn["finish_reason"]) == ("Both have sun: sun; sun.", "stop")
    messages += [turn["message"], {"role": "user", "content": "How are you?"}]
    assert read(client, messages, tools=tools)["message"]["content"] == "I am well, thank you."


CALL = {
    "id": "call_62136354",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"location":"Oslo"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_62136354", "content": "7 degrees"}
AS_DATA = {**CALL, "function": {"name": "get_weather", "arguments": {"location": "Oslo"}}}
HISTORIES = {
    "openai": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "what its client sends back": [
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [CALL],
        },
        RESULT,
    ],
    "without content": [{"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "empty content": [{"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    "arguments as data": [{"role": "assistant", "content": None, "tool_calls": [AS_DATA]}, RESULT],
    "a name in the result": [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {**RESULT, "name": "get_weather"},
    ],
    "parts": [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [CALL]},
        {**RESULT, "content": [{"type": "text", "text": "7 degrees"}]},
    ],
    "deepseek's thought": [
        {"role": "assistant", "content": "", "reasoning_content": "I should look.", "tool_calls": [CALL]},
        RESULT,
    ],
    "vllm's thought": [
        {"role": "assistant", "content": "", "reasoning": "I should look.", "tool_calls": [CALL]},
        RESULT,
    ],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_histories_as_clients_write_them(client, history):
    for read in (ask, read_stream):
        message = read(client, [SYSTEM, OSLO, *history], tools=[WEATHER])["message"]
        assert message["content"] == "In Oslo: 7 degrees."


FORCED: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "get_weather"}},
    "allowed, auto": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    },
    "allowed, required": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    },
}


@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
@pytest.mark.parametrize("read", [ask, read_stream], ids=["whole", "stream"])
def test_choices_of_tools(client, read, choice):
    message = read(client, [OSLO], tools=[ADD, WEATHER], tool_choice=choice)["message"]
    assert arguments(message) == [("get_weather", {"location": "Oslo"})]


def test_no_call_where_none_is_allowed(client):
    for read in (ask, read_stream):
        message = read(client, [OSLO], tools=[WEATHER], tool_choice="none")["message"]
        assert not message.get("tool_calls") and message["content"]


FIELDS: dict[str, dict[str, Any]] = {
    "openai's newer ones": {
        "max_completion_tokens": 200,
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"agent": "x"},
        "service_tier": "auto",
        "prompt_cache_key": "thread-1",
        "safety_identifier": "user-1",
        "verbosity": "medium",
        "user": "user-1",
        "n": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logprobs": False,
        "seed": 7,
        "stop": None,
    },
    "a thought's length": {"reasoning_effort": "low"},
    "a thought that is not shown": {"include_reasoning": False},
    "usage in a stream": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_fields_that_agents_send(client, fields):
    turn = read_stream(client, [{"role": "developer", "content": "Be brief."}, OSLO], tools=[WEATHER], **fields)
    assert arguments(turn["message"]) == [("get_weather", {"location": "Oslo"})]
    assert turn["message"]["reasoning_content"].strip() == ("" if "include_reasoning" in fields else THOUGHT)


def test_a_custom_tool_gets_text(client):
    """A custom tool takes one text in place of an object (OpenAI's guide, "Custom tools")."""
    tool = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
    message = ask(client, [{"role": "user", "content": "List the files."}], tools=[tool])["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": "ls -l"})
