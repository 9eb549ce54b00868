"""LiteLLM, by its providers for servers that speak OpenAI's interface."""

from __future__ import annotations

import asyncio
import json

import litellm
import pytest
from pydantic import BaseModel

THOUGHT = "The last message decides what is to do."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}


class Joke(BaseModel):
    """A joke as data."""

    setup: str
    punchline: str


@pytest.fixture(params=["openai/scripted", "hosted_vllm/scripted"])
def to(request, server):
    return {"model": request.param, "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_an_answer_and_its_thought(to):
    message = litellm.completion(messages=user("Hello"), **to).choices[0].message
    assert message.content == "Hello! How may I help you?"
    assert message.reasoning_content.strip() == THOUGHT


def test_a_stream(to):
    chunks = list(litellm.completion(messages=user("Hello"), stream=True, stream_options={"include_usage": True}, **to))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == "Hello! How may I help you?"
    assert whole.choices[0].message.reasoning_content.strip() == THOUGHT
    assert whole.usage.completion_tokens > 10


def test_calls_whole_and_streamed(to):
    asked = {"messages": user("What is the weather in Oslo and Rome?"), "tools": [WEATHER], **to}
    message = litellm.completion(**asked).choices[0].message
    streamed = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked))).choices[0].message
    for found in (message, streamed):
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
        assert calls == [("get_weather", {"location": "Oslo"}), ("get_weather", {"location": "Rome"})]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
    last = litellm.completion(**{**asked, "messages": [*asked["messages"], message.model_dump(), *results]})
    assert last.choices[0].message.content == "Both have sun: sun; sun."


def test_data(to):
    done = litellm.completion(messages=user("Tell me a joke about cats."), response_format=Joke, **to)
    assert Joke.model_validate_json(done.choices[0].message.content).setup == "Why do cats like keyboards?"


def test_text_and_vectors(to, server):
    done = litellm.text_completion(prompt="Question: What is two plus two?\nAnswer:", max_tokens=3, **to)
    assert done.choices[0].text.strip() == "four"
    provider = to["model"].partition("/")[0]
    found = litellm.embedding(
        model=f"{provider}/scripted", input=["a", "b"], api_base=f"{server.url}/v1", api_key="none"
    )
    assert len(found.data) == 2 and len(found.data[0]["embedding"]) == 16


def test_many_at_once(to):
    async def work() -> list[str]:
        done = await asyncio.gather(*(litellm.acompletion(messages=user("Hello"), **to) for _ in range(6)))
        return [found.choices[0].message.content for found in done]

    assert asyncio.run(work()) == ["Hello! How may I help you?"] * 6


def test_errors_keep_their_kind(to):
    with pytest.raises(litellm.BadRequestError, match="max_tokens"):
        litellm.completion(messages=user("Hello"), max_tokens=10**7, **to)
