"""Thoughts and calls over HTTP, from a model that a template lets think and that constraints let answer rightly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving.live import Live

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
CALL = r'<tool_call>\n\{"name": "get", "arguments": \{"n": 7\}\}\n</tool_call>'
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "import os"}], "temperature": 0, "max_tokens": 200}
CHAT = "/v1/chat/completions"
OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"thinking": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live("--chat-template", TEMPLATE, "--tool-call-parser", "hermes") as server:
        yield server
        server.at_rest()
        assert server.stop() == 0


@pytest.fixture(scope="module")
def api(live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


def chat(api: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = api.post(CHAT, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(api: httpx.Client, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices of a stream's chunks, and its usage."""
    body = {**BODY, **fields, "stream": True, "stream_options": {"include_usage": True}}
    text = api.post(CHAT, json=body).raise_for_status().text
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    return [c for chunk in chunks for c in chunk["choices"]], chunks[-1]["usage"]


def test_a_thought_within_a_budget_and_a_constraint_after_it(api):
    regex = "The answer is 42[.]"
    done = chat(api, thinking_token_budget=8, regex=regex)
    message, usage = done["choices"][0]["message"], done["usage"]
    assert message["content"] == "The answer is 42." and message["reasoning"] == message["reasoning_content"] != ""
    assert 8 <= usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    chunks, usage_of_stream = stream(api, thinking_token_budget=8, regex=regex)
    assert "".join(c["delta"].get("content", "") for c in chunks) == message["content"]
    assert "".join(c["delta"].get("reasoning_content", "") for c in chunks) == message["reasoning_content"]
    counted = (usage["completion_tokens"], usage["completion_tokens_details"])
    assert (usage_of_stream["completion_tokens"], usage_of_stream["completion_tokens_details"]) == counted
    for name, value in (
        ("thinking_budget", 8),
        ("reasoning_max_tokens", 8),
        ("thinking", {"type": "enabled", "budget_tokens": 8}),
    ):
        assert chat(api, **{name: value}, regex=regex)["choices"][0]["message"] == message


@pytest.mark.parametrize("fields", OFF)
def test_thinking_is_off_by_any_of_its_names(api, fields):
    answer = api.post(CHAT, json={**BODY, **fields, "regex": "Yes[.]"}).raise_for_status()
    message = answer.json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", None)
    assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "x-inferplane-ignored" not in answer.headers
    plain = {"messages": BODY["messages"], **fields}
    tokens = api.post("/tokenize", json=plain).raise_for_status().json()["count"]
    assert answer.json()["usage"]["prompt_tokens"] == tokens


def test_an_effort_that_the_template_cannot_tell_is_said_to_be_ignored(api):
    answer = api.post(CHAT, json={**BODY, "reasoning_effort": "high", "thinking_budget": 4, "regex": "Yes[.]"})
    assert answer.raise_for_status().headers["x-inferplane-ignored"] == "reasoning_effort"
    assert answer.json()["choices"][0]["message"]["reasoning"]


def test_what_is_answered_of_a_thought(api):
    fields = {"thinking_budget": 8, "regex": "Yes[.]"}
    whole = chat(api, **fields)
    hidden = chat(api, **fields, include_reasoning=False)
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert hidden["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    assert not any("reasoning" in c["delta"] for c in stream(api, **fields, include_reasoning=False)[0])
    text = chat(api, separate_reasoning=False, max_tokens=6)["choices"][0]["message"]
    assert text["content"] and "reasoning" not in text


def test_a_schema_begins_after_the_thought(api):
    schema = {"name": "s", "strict": True, "schema": TOOL["function"]["parameters"]}
    form = {"type": "json_schema", "json_schema": schema}
    message = chat(api, thinking_budget=8, response_format=form)["choices"][0]["message"]
    assert message["reasoning"] and 1 <= json.loads(message["content"])["n"] <= 9


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_calls_after_a_thought_stream_piece_by_piece(api, choice):
    fields: dict[str, Any] = {"tools": [TOOL], "thinking_budget": 8, "parallel_tool_calls": False}
    fields["tool_choice"] = {"type": "function", "function": {"name": "get"}} if choice == "named" else choice
    if choice == "auto":
        fields["regex"] = CALL
    message = chat(api, **fields)["choices"][0]["message"]
    (call,) = message["tool_calls"][:1]
    assert message["reasoning"] and message["content"] is None and call["function"]["name"] == "get"
    assert 1 <= json.loads(call["function"]["arguments"])["n"] <= 9
    chunks, _ = stream(api, **fields)
    pieces = [c for chunk in chunks for c in chunk["delta"].get("tool_calls", ()) if c["index"] == 0]
    assert pieces[0]["id"] and pieces[0]["function"]["name"] == "get" and "id" not in pieces[1]
    assert "".join(p["function"]["arguments"] for p in pieces) == call["function"]["arguments"]
    assert len(pieces) > 3 and chunks[-1]["finish_reason"] == "tool_calls"


def test_earlier_thoughts_reach_the_template(api):
    earlier = {"role": "assistant", "content": "a", "reasoning": "because"}
    sent = {"messages": [*BODY["messages"], earlier], "enable_thinking": False}
    ids = api.post("/tokenize", json=sent).raise_for_status().json()["tokens"]
    assert "a(because)" in api.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_a_thought_is_continued(api):
    opened = {"role": "assistant", "content": "<think>\nWell, let me"}
    fields = {"messages": [*BODY["messages"], opened], "continue_final_message": True, "thinking_budget": 4}
    message = chat(api, **fields, regex="Yes[.]")["choices"][0]["message"]
    assert message["content"] == "Yes." and message["reasoning"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"thinking_budget": 4, "reasoning_max_tokens": 5}, "reasoning_max_tokens"),
        (CHAT, {"thinking_budget": -1}, "thinking_budget"),
        (CHAT, {"thinking": {"type": "none"}}, "thinking.type"),
        ("/v1/completions", {"prompt": "x", "thinking_token_budget": 4}, "thinking_token_budget"),
    ],
)
def test_what_makes_no_sense_is_refused(api, path, fields, param):
    answer = api.post(path, json={**({} if "prompt" in fields else BODY), **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_model_that_does_not_think(client):
    body = {"messages": BODY["messages"], "max_tokens": 1}
    for fields, status in (
        ({"enable_thinking": False}, 200),
        ({"reasoning_effort": "none"}, 200),
        ({"enable_thinking": True}, 200),
        ({"reasoning_effort": "low"}, 200),
        ({"thinking_token_budget": 5}, 400),
        ({"include_reasoning": True}, 200),
    ):
        answer = client.post(CHAT, json={**body, **fields})
        assert answer.status_code == status, answer.text
        if status == 200 and "include_reasoning" not in fields:
            assert answer.headers["x-inferplane-ignored"] == next(iter(fields))


def test_the_official_client_reads_thoughts_and_calls(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as official:
        create: Any = official.chat.completions.create
        common = {**BODY, "model": "default", "extra_body": {"thinking_budget": 8, "regex": CALL}}
        done = create(**common, tools=[TOOL])
        message = done.choices[0].message
        assert message.reasoning_content and json.loads(message.tool_calls[0].function.arguments) == {"n": 7}
        assert done.usage.completion_tokens_details.reasoning_tokens >= 8
        grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "1[+]1"}}
        custom = {"type": "custom", "custom": {"name": "sum", "format": grammar}}
        choice = {"type": "custom", "custom": {"name": "sum"}}
        common["extra_body"] = {"thinking_budget": 8}
        message = create(**common, tools=[custom], tool_choice=choice).choices[0].message
        assert message.tool_calls[0].custom.input == "1+1"
        back = [*BODY["messages"], message.model_dump(exclude_none=True)]
        back += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
        assert create(**{**common, "messages": back, "max_tokens": 2}, tools=[custom]).choices
