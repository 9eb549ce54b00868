"""Pydantic AI's agents: text, tools, typed output in each of its modes, streams, thoughts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

OSLO = "What is the weather in Oslo?"


class Joke(BaseModel):
    """A joke as data."""

    setup: str
    punchline: str


def make_agent(server: Any, **more: Any) -> Agent:
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    return Agent(OpenAIChatModel("scripted", provider=provider), model_settings=ModelSettings(temperature=0), **more)


def test_text_and_thought(server):
    done = make_agent(server).run_sync("Hello")
    assert done.output == "Hello! How may I help you?"
    (thought,) = [p for m in done.all_messages() for p in m.parts if isinstance(p, ThinkingPart)]
    assert "decides" in thought.content
    assert done.usage.output_tokens > 10


def test_tools(server):
    places = []

    def get_weather(location: str) -> str:
        """The weather at a place."""
        places.append(location)
        return "7 degrees"

    done = make_agent(server, tools=[get_weather]).run_sync(OSLO)
    assert (done.output, places) == ("In Oslo: 7 degrees.", ["Oslo"])
    done = make_agent(server, tools=[get_weather]).run_sync("What is the weather in Oslo and Rome?")
    assert (done.output, sorted(places)) == ("Both have sun: 7 degrees; 7 degrees.", ["Oslo", "Oslo", "Rome"])


@pytest.mark.parametrize("mode", [ToolOutput, NativeOutput, PromptedOutput])
def test_typed_output(server, mode):
    done = make_agent(server, output_type=mode(Joke)).run_sync("Tell me a joke about cats.")
    assert done.output == Joke(setup="Why do cats like keyboards?", punchline="Because of the mouse beside them.")


def test_streams(server):
    def get_weather(location: str) -> str:
        """The weather at a place."""
        return "7 degrees"

    async def work() -> None:
        async with make_agent(server, tools=[get_weather]).run_stream(OSLO) as run:
            pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == "In Oslo: 7 degrees." and len(pieces) > 2
        assert any(isinstance(part, ToolCallPart) for m in run.all_messages() for part in m.parts)
        async with make_agent(server, output_type=Joke).run_stream("Tell me a joke about cats.") as run:
            shown = [joke async for joke in run.stream_output(debounce_by=None)]
        assert shown[-1].punchline == "Because of the mouse beside them."

    asyncio.run(work())
