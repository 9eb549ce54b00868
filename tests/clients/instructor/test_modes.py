"""instructor in every mode that it has for OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel

JOKE = [{"role": "user", "content": "Tell me a joke about cats."}]
OBJECTS = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_O1, Mode.MD_JSON, Mode.JSON_SCHEMA)


class Joke(BaseModel):
    """A joke as data."""

    setup: str
    punchline: str


class get_weather(BaseModel):
    """The weather at a place."""

    location: str


def make_client(server, mode: Mode) -> instructor.Instructor:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(api, mode=mode)


@pytest.mark.parametrize("mode", OBJECTS)
def test_an_object(server, mode):
    client = make_client(server, mode)
    joke = client.chat.completions.create(
        model="scripted", messages=JOKE, response_model=Joke, max_retries=0, temperature=0
    )
    assert joke.model_dump() == {
        "setup": "Why do cats like keyboards?",
        "punchline": "Because of the mouse beside them.",
    }


@pytest.mark.parametrize("mode", OBJECTS)
def test_an_object_that_grows(server, mode):
    if mode is Mode.JSON_O1:
        pytest.skip("the client itself does not stream in this mode")
    shown = list(
        make_client(server, mode).chat.completions.create_partial(
            model="scripted", messages=JOKE, response_model=Joke, max_retries=0, temperature=0
        )
    )
    assert shown[-1].punchline == "Because of the mouse beside them." and len(shown) > 2


def test_parallel_tools(server):
    asked = [{"role": "user", "content": "What is the weather in Oslo and Rome?"}]
    calls = make_client(server, Mode.PARALLEL_TOOLS).chat.completions.create(
        model="scripted", messages=asked, response_model=Iterable[get_weather], temperature=0
    )
    assert [call.location for call in calls] == ["Oslo", "Rome"]
