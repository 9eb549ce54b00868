"""OpenAI's official client, with its typed parsing, against a live server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion

GREEDY = {"model": "default", "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
LONG = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 900}},
            "required": ["text"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "import"},
    {"role": "assistant", "content": "os"},
    {"role": "user", "content": [{"type": "text", "text": "def main"}, {"type": "text", "text": "():"}]},
]


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


# ---------------------------------------------------------------- models


def test_models(api):
    names = [m.id for m in api.models.list()]
    assert names == ["demo", "default"]
    assert api.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError) as refused:
        api.completions.create(model="gpt-9", prompt="x")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


# ---------------------------------------------------------------- completions


def test_completion(api):
    done = api.completions.create(**GREEDY, prompt="import os", max_tokens=8)
    assert done.object == "text_completion"
    assert done.choices[0].finish_reason == "length"
    assert len(done.choices[0].text) > 4
    assert (done.usage.completion_tokens, done.usage.prompt_tokens) == (8, 3)
    assert done.usage.total_tokens == 11
    assert done.system_fingerprint.startswith("fp_")


def test_completion_stream_equals_the_whole(api):
    whole = api.completions.create(**GREEDY, prompt="class Stack:", max_tokens=24)
    chunks = list(
        api.completions.create(
            **GREEDY, prompt="class Stack:", max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    assert "".join(c.choices[0].text for c in pieces) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert len({c.id for c in chunks}) == 1


def test_several_prompts_as_text_and_as_ids_and_several_sequences(api):
    texts = ["import os", "def main():"]
    ids = [api.post("/../tokenize", body={"prompt": t}, cast_to=object)["tokens"] for t in texts]
    by_text = api.completions.create(**GREEDY, prompt=texts, max_tokens=6)
    by_ids = api.completions.create(**GREEDY, prompt=ids, max_tokens=6)
    alone = [api.completions.create(**GREEDY, prompt=i, max_tokens=6).choices[0].text for i in ids]
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] == alone
    assert [c.index for c in by_text.choices] == [0, 1]
    sampled = {"model": "default", "prompt": texts[0], "max_tokens": 12, "seed": 5, "n": 3}
    first = api.completions.create(**sampled)
    again = api.completions.create(**sampled)
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert len({c.text for c in first.choices}) > 1
    assert first.usage.prompt_tokens == len(ids[0])


def test_streams_of_several_sequences_are_distinguished(api):
    asked = {"model": "default", "prompt": ["import os", "x = "], "max_tokens": 8, "seed": 1, "n": 2}
    whole = api.completions.create(**asked)
    texts = {}
    ends = {}
    for chunk in api.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            assert choice.index not in ends
            ends[choice.index] = choice.finish_reason
    assert texts == {c.index: c.text for c in whole.choices}
    assert ends == {c.index: c.finish_reason for c in whole.choices}


def test_echo_and_logprobs(api):
    done = api.completions.create(**GREEDY, prompt="import os", max_tokens=2, echo=True, logprobs=3)
    choice = done.choices[0]
    assert choice.text.startswith("import os")
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset) == 5
    assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
    assert all(p <= 0 for p in scores.token_logprobs[1:])
    assert all(3 <= len(top) <= 4 for top in scores.top_logprobs[1:])
    for token, score, top in zip(scores.tokens[3:], scores.token_logprobs[3:], scores.top_logprobs[3:]):
        assert top[token] == score == max(top.values())  # greedy
    assert scores.text_offset == [0, 6, 7, 9, 10]
    # Scoring alone, as evaluation harnesses ask for it.
    only = api.completions.create(**GREEDY, prompt="import os", max_tokens=0, echo=True, logprobs=1)
    assert only.choices[0].text == "import os"
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[:3]
    assert only.usage.completion_tokens == 0


def test_stop_is_not_part_of_the_text(api):
    free = api.completions.create(**GREEDY, prompt="import os", max_tokens=16).choices[0].text
    stop = free[3:6]
    asked = {**GREEDY, "prompt": "import os", "max_tokens": 16, "stop": stop}
    done = api.completions.create(**asked)
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].text == free[: free.index(stop)]
    streamed = "".join(c.choices[0].text for c in api.completions.create(**asked, stream=True))
    assert streamed == done.choices[0].text


def test_logit_bias_and_seed(api):
    token = api.post("/../tokenize", body={"prompt": "os"}, cast_to=object)["tokens"][0]
    forced = api.completions.create(**GREEDY, prompt="x", max_tokens=3, logit_bias={str(token): 100})
    assert forced.choices[0].text == "ososos"
    seeds = [
        api.completions.create(model="default", prompt="x", max_tokens=12, seed=s).choices[0].text for s in (0, 0, 1)
    ]
    assert seeds[0] == seeds[1] != seeds[2]


# ---------------------------------------------------------------- chat


def test_chat_and_its_stream(api):
    whole = api.chat.completions.create(**GREEDY, messages=MESSAGES, max_completion_tokens=12)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    chunks = list(
        api.chat.completions.create(
            **GREEDY, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    *pieces, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in pieces if c.choices[0].finish_reason] == ["length"]
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage == whole.usage


def test_chat_logprobs(api):
    done = api.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2)
    content = done.choices[0].logprobs.content
    assert len(content) == 6
    assert b"".join(bytes(t.bytes) for t in content).decode() == done.choices[0].message.content
    assert all(len(t.top_logprobs) == 2 and t.logprob == t.top_logprobs[0].logprob for t in content)
    streamed = []
    for chunk in api.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, stream=True
    ):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_json_object_and_schema(api):
    some = api.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=300, seed=3, response_format={"type": "json_object"}
    )
    if some.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(some.choices[0].message.content), dict)
    schema = TOOL["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    for seed in range(3):
        done = api.chat.completions.create(
            model="default", messages=MESSAGES, max_tokens=200, seed=seed, response_format=form
        )
        assert done.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(done.choices[0].message.content), schema)


def test_named_tool(api):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked = {"model": "default", "messages": MESSAGES, "tools": [OTHER, TOOL], "tool_choice": choice, "max_tokens": 200}
    done = api.chat.completions.create(**asked, seed=2)
    (call,) = done.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert done.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])
    name, arguments = streamed_calls(api.chat.completions.create(**asked, seed=2, stream=True))[0]
    assert (name, arguments) == ("get_weather", call.function.arguments)


def test_required_tool_and_the_answer_to_it(api):
    asked = {"model": "default", "messages": MESSAGES, "tools": [OTHER, TOOL], "tool_choice": "required"}
    asked.update(max_tokens=300, parallel_tool_calls=False)
    done = api.chat.completions.create(**asked, seed=4)
    assert done.choices[0].finish_reason == "tool_calls"
    (call,) = done.choices[0].message.tool_calls
    assert call.function.name in ("ping", "get_weather")
    streamed = streamed_calls(api.chat.completions.create(**asked, seed=4, stream=True))
    assert streamed == {0: (call.function.name, call.function.arguments)}
    answered = [
        *MESSAGES,
        done.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    more = api.chat.completions.create(**GREEDY, messages=answered, tools=[TOOL], max_tokens=4)
    assert isinstance(more, ChatCompletion)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write"}}])
def test_a_demanded_call_that_is_cut_off_is_no_content(api, choice):
    asked = {"model": "default", "messages": MESSAGES, "tools": [LONG], "tool_choice": choice, "max_tokens": 60}
    done = api.chat.completions.create(**asked, seed=4).choices[0]
    assert done.finish_reason == "length" and not done.message.content
    (call,) = done.message.tool_calls
    streamed = streamed_calls(api.chat.completions.create(**asked, seed=4, stream=True))
    assert list(streamed) == [0]  # its text may differ: the second run finds its prompt in the cache
    for name, arguments in ((call.function.name, call.function.arguments), streamed[0]):
        assert name == "write" and arguments.startswith("{")


def streamed_calls(chunks) -> dict[int, tuple[str, str]]:
    """Calls of a stream, by index, put together as clients do it."""
    found: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or ():
            name, arguments = found.get(part.index, ("", ""))
            found[part.index] = (name + (part.function.name or ""), arguments + (part.function.arguments or ""))
    return found


def test_parsing_helpers_of_the_client(api):
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=9)
        label: str = pydantic.Field(max_length=5)

    done = api.chat.completions.parse(model="default", messages=MESSAGES, max_tokens=300, seed=1, response_format=Point)
    assert isinstance(done.choices[0].message.parsed, Point)


def test_refusals_name_the_field(api):
    cases = [
        ({"messages": []}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 100_000}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "resp",
        ),
        ({"functions": []}, "functions"),
    ]
    for more, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(**{**GREEDY, "messages": MESSAGES, "max_tokens": 4, **more})
        assert refused.value.param.startswith(param), (more, refused.value.body)


# ---------------------------------------------------------------- asyncio


def test_async_streams_side_by_side(server):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:

            async def one(prompt: str) -> tuple[str, str]:
                whole = await api.completions.create(**GREEDY, prompt=prompt, max_tokens=12)
                text = ""
                async for chunk in await api.completions.create(**GREEDY, prompt=prompt, max_tokens=12, stream=True):
                    text += chunk.choices[0].text
                return whole.choices[0].text, text

            for whole, streamed in await asyncio.gather(*(one(f"def f{i}(") for i in range(8))):
                assert whole == streamed

    asyncio.run(run())


def test_leaving_a_stream_early_ends_its_request(server):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            stream = await api.completions.create(model="default", prompt="x", max_tokens=1500, stream=True)
            async for _ in stream:
                break
            await stream.close()

    before = server.metrics().get('inferplane:requests_aborted_total{cause="disconnect"}', 0)
    asyncio.run(run())
    after = server.at_rest()
    assert after['inferplane:requests_aborted_total{cause="disconnect"}'] == before + 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}])
def test_usage_so_far_in_each_chunk(server, path, n, more):
    chat = "chat" in path
    logprobs = {"logprobs": 1} if more.get("logprobs") and not chat else more
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 6, "ignore_eos": True, "n": n, "stream": True, **logprobs}
    asked.update({"messages": MESSAGES} if chat else {"prompt": "class Stack:"})

    def usages(**options: bool) -> list[tuple[list[int], Any]]:
        with server.client() as client:
            text = client.post(path, json={**asked, "stream_options": options}).raise_for_status().text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [([c["index"] for c in chunk["choices"]], chunk.get("usage")) for chunk in chunks]

    *chunks, (no_choice, last) = usages(include_usage=True, continuous_usage_stats=True)
    assert no_choice == [] and last["completion_tokens"] == 6 * n
    for index in range(n):
        own = [usage for choices, usage in chunks if choices == [index]]
        counts = [usage["completion_tokens"] for usage in own]
        assert counts == sorted(counts) and counts[0] <= 1 and counts[-1] == 6 and len(set(counts)) > 3, counts
        assert all(u["prompt_tokens"] == last["prompt_tokens"] for u in own)
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in own)
    assert not any(usage for _, usage in usages(include_usage=True, continuous_usage_stats=False)[:-1])
    assert not any(usage for _, usage in usages(include_usage=False, continuous_usage_stats=True))
