"""From a conversation to a call: what the engine is asked to hold a reply to, and what has no effect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from inferplane.dialogue.replies import call_rules
from inferplane.dialogue.replies.catalog import FORMS
from inferplane.dialogue.replies.tables import HARMONY_ANALYSIS
from inferplane.dialogue.template import Template
from inferplane.engine import SamplingParams
from inferplane.serving.admission import GenerateCall
from inferplane.serving.chat import call as calls
from inferplane.serving.chat.reply import JoinedReply, ReplyPlan, ReplyReader
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat.tools import plan_tools
from inferplane.serving.errors import ApiError
from inferplane.serving.wire import validate

OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"
HARMONY = "<|start|>assistant"
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LONG = {**NUMBER, "description": "x" * 70_000}
ANSWER = "<|channel|>final<|message|>"


def tool(schema: dict[str, Any] = NUMBER, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get", "parameters": schema, **more}}


@pytest.fixture
def build(monkeypatch):
    """Builds the call of a request to a model of a form, whose template renders any conversation as one text."""

    def run(form: str, prompt: str, **fields: Any) -> tuple[GenerateCall, ReplyPlan]:
        template = SimpleNamespace(facts=Template("{{ messages }}{{ tools }}{{ reasoning_effort }}", {}))

        @asynccontextmanager
        async def use_template(source: str | None = None) -> AsyncIterator[Any]:
            yield template

        async def render(*args: Any) -> str:
            return prompt

        monkeypatch.setattr(calls, "render_messages", render)
        own = next(found for found in FORMS if found.name == form)
        model: Any = SimpleNamespace(
            can_constrain=True, special_tokens={}, reply_form=lambda facts: own, use_template=use_template
        )
        request = validate(ChatRequest, {"messages": [{"role": "user", "content": "x"}], **fields})
        return asyncio.run(calls.build_call(request, model, plan_tools(request)))

    return run


def read(plan: ReplyPlan, text: str) -> JoinedReply:
    reader = ReplyReader(plan)
    return JoinedReply.of([*reader.feed(text), *reader.end()])


@pytest.mark.parametrize("prompt", [OPEN, CLOSED])
@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 5},
        {"response_format": {"type": "json_object"}},
        {"tools": [tool()]},
        {"tools": [tool()], "tool_choice": "required"},
    ],
)
def test_a_thought_that_stays_in_the_content_is_one_to_the_engine(build, prompt, fields):
    apart, joined = (build("qwen3", prompt, **fields, separate_reasoning=value)[0] for value in (True, False))
    span = joined.sampling["reasoning"]
    assert span == apart.sampling["reasoning"] and span.is_open == (prompt == OPEN)
    assert span.max_tokens == fields.get("thinking_token_budget")
    assert SamplingParams(**joined.sampling).needs_grammar == ("thinking_token_budget" not in fields)


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_a_thought_says_of_calls_is_content(build, is_shown):
    fields = {"tools": [tool()], "tool_choice": "required", "separate_reasoning": False, "include_reasoning": is_shown}
    plan = build("qwen3", OPEN, **fields)[1]
    call = '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>'
    reply = read(plan, f"I write {call} now.\n</think>\n\n{call}")
    assert [c["function"]["arguments"] for c in reply.calls] == ['{"n": 1}'] and reply.reasoning == ""
    assert reply.content == (f"I write {call} now.\n</think>\n\n" if is_shown else "")


def test_a_call_inside_of_a_thought_in_the_content_is_none(build):
    call = '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>'
    plan = build("qwen3", CLOSED, tools=[tool()], separate_reasoning=False)[1]
    thought = f"<think>\nI could write {call}.\n</think>\n\n"
    reply = read(plan, f"{thought}I look.\n{call}")
    assert (reply.content, len(reply.calls), reply.reasoning) == (f"{thought}I look.", 1, "")
    opened = read(build("qwen3", OPEN, tools=[tool()], separate_reasoning=False)[1], f"{call}\n</think>\n\nNo.")
    assert (opened.content, opened.calls) == (f"{call}\n</think>\n\nNo.", [])


def test_a_thought_in_the_content_of_a_bare_call(build):
    choice = {"type": "custom", "custom": {"name": "patch"}}
    custom = {"type": "custom", "custom": {"name": "patch"}}
    plan = build("qwen3", OPEN, tools=[custom], tool_choice=choice, separate_reasoning=False)[1]
    reply = read(plan, "So.\n</think>\n\n+1")
    assert plan.is_bare and reply.content == "So.\n</think>\n\n" and reply.calls[0]["custom"]["input"] == "+1"


# ------------------------------------------------------------------ gpt-oss


@pytest.mark.parametrize(
    ("fields", "forced"),
    [
        ({}, HARMONY_ANALYSIS.forced_end),
        ({"response_format": {"type": "json_object"}}, HARMONY_ANALYSIS.forced_end),
        ({"tools": [tool()]}, "<|end|>"),
        ({"tools": [tool()], "tool_choice": "required"}, "<|end|>"),
        ({"tools": [tool()], "tool_choice": "none"}, HARMONY_ANALYSIS.forced_end),
        ({"tools": [tool()], "tool_choice": "none", "regex": "Yes"}, HARMONY_ANALYSIS.forced_end),
    ],
)
def test_where_calls_may_follow_no_answer_is_forced(build, fields, forced):
    span = build("openai", HARMONY, **fields, thinking_token_budget=5)[0].sampling["reasoning"]
    assert span.forced_end == forced and span.max_tokens == 5


def test_no_thought_before_a_constraint_begins_the_answer(build):
    form = {"response_format": {"type": "json_object"}, "thinking_token_budget": 0}
    span = build("openai", HARMONY, **form)[0].sampling["reasoning"]
    assert span.is_open and span.forced_end == ANSWER == span.end[0]
    opened = build("openai", f"{HARMONY}<|channel|>analysis<|message|>", **form)[0].sampling["reasoning"]
    assert opened.forced_end == HARMONY_ANALYSIS.forced_end


def test_a_budget_before_json_alone_is_named(build):
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    custom = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    call, plan = build("openai", HARMONY, tools=[custom], tool_choice=choice, thinking_budget=5)
    assert call.ignored == ["thinking_budget"] and "reasoning" not in call.sampling and plan.is_bare


def test_a_text_of_a_custom_tool_has_a_header(build):
    custom = {"type": "custom", "custom": {"name": "patch"}}
    call, plan = build("openai", HARMONY, tools=[custom], tool_choice=custom, thinking_budget=5)
    assert "commentary to=functions." in call.sampling["grammar"] and call.sampling["reasoning"].max_tokens == 5
    text = '<|channel|>commentary to=functions.patch <|constrain|>json<|message|>{"input": "+1"}<|call|>'
    reply = read(plan, f"<|channel|>analysis<|message|>So.<|end|><|start|>assistant{text}")
    assert reply.reasoning == "So." and reply.calls[0]["custom"]["input"] == "+1" and not reply.content


@pytest.mark.parametrize("value", ["none", "low"])
def test_gpt_oss_always_thinks(build, value):
    if value == "none":
        with pytest.raises(ApiError, match="thinks at any effort") as refused:
            build("openai", HARMONY, reasoning_effort=value)
        assert (refused.value.status, refused.value.param) == (400, "reasoning_effort")
    else:
        assert build("openai", HARMONY, reasoning_effort=value)[0].ignored == []
    assert build("qwen3", OPEN, reasoning_effort=value)[0].ignored == []


# ------------------------------------------------------------------ rules of calls


LIMITED = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "string", "pattern": "^b"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("form", "ignored"), [("qwen3_coder", ["tools.maxLength", "tools.pattern"]), ("qwen3", [])], ids=["xml", "json"]
)
def test_limits_of_texts_that_a_form_does_not_hold_are_named(build, form, ignored, choice):
    assert build(form, CLOSED, tools=[tool(LIMITED)], tool_choice=choice)[0].ignored == ignored


@pytest.mark.parametrize(
    ("form", "schema", "is_strict", "ignored"),
    [
        ("qwen3", NUMBER, True, []),
        ("qwen3_coder", {"type": "object", "additionalProperties": True}, False, ["tools.parameters"]),
        ("qwen3", LONG, False, ["tools.parameters"]),
        ("json", NUMBER, True, ["tools.strict"]),
        ("json", NUMBER, False, []),
    ],
)
def test_schemas_that_no_rule_enforces_are_named(build, form, schema, is_strict, ignored):
    assert build(form, CLOSED, tools=[tool(schema, strict=is_strict)])[0].ignored == ignored


def test_a_strict_function_whose_rule_is_too_long_is_refused(build):
    with pytest.raises(ApiError, match="Strict functions cannot be enforced") as refused:
        build("qwen3", CLOSED, tools=[tool(LONG, strict=True)])
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_rules_are_written_beside_the_event_loop(build, monkeypatch, choice):
    threads = []

    def write(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return "start: /x/"

    monkeypatch.setattr(call_rules, "make_call_grammar", write)
    build("qwen3", CLOSED, tools=[tool()], tool_choice=choice)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


# ------------------------------------------------------------------ ids


def test_each_call_has_an_id_of_its_own(build):
    plan = build("kimi_k2", CLOSED, tools=[tool()])[1]
    one = '<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'
    reply = read(plan, f"<|tool_calls_section_begin|>{one}{one}{one}<|tool_calls_section_end|>")
    ids = [call["id"] for call in reply.calls]
    assert len(ids) == len(set(ids)) == 3 and ids[:2] == ["functions.get:0", "functions.get:1"]


def test_two_tools_of_one_name_are_refused(build):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    custom = {"type": "custom", "custom": {"name": "add"}}
    for second in (tool, custom):
        with pytest.raises(ApiError, match="Two tools have the name 'add'") as refused:
            build("qwen3", CLOSED, tools=[tool, second])
        assert (refused.value.status, refused.value.param) == (400, "tools")
