"""What a reply is parsed into, however its text is cut."""

from __future__ import annotations

import pytest

from inferplane.dialogue.replies.catalog import FORMS, choose_form
from inferplane.dialogue.replies.events import Arguments, CallStart, Content, Reasoning, join_events
from inferplane.dialogue.replies.parser import ReplyParser

TOOLS = {
    "get": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "put": {"type": "object"},
}


def form(reasoning, tools="none"):
    return choose_form(FORMS[-1], reasoning, tools)


def parse(form, text, size=10**6, **options):
    parser = ReplyParser(form, TOOLS, **options)
    events = [event for i in range(0, len(text), size) for event in parser.feed(text[i : i + size])]
    return join_events([*events, *parser.end()])


def call(name, arguments, index=0, call_id=""):
    return [CallStart(index, name, call_id), Arguments(index, arguments)]


ONE = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, world", [Content("Hello, world")]),
        ("a < b <tool", [Content("a < b <tool")]),
        ("<tool_call>broken", [Content("<tool_call>broken")]),
        (f"I look.\n{ONE}", [Content("I look."), *call("get", '{"a": 1}')]),
        (f"I look. {ONE}", [Content("I look. "), *call("get", '{"a": 1}')]),
        (f"<think>\nTry {ONE}\n</think>\n\nNo.", [Reasoning(f"Try {ONE}"), Content("No.")]),
        (f"<think>\n\n</think>\n\n{ONE}\n{ONE}", [*call("get", '{"a": 1}'), *call("get", '{"a": 1}', 1)]),
        ("The mark <think> begins a thought.", [Content("The mark <think> begins a thought.")]),
        ('{"name": "nobody"}', [Content('{"name": "nobody"}')]),
        ('<tool_call>{"name": "put"}</tool_call> done', [*call("put", "{}"), Content(" done")]),
    ],
)
def test_events_of_a_reply(text, expected, size):
    assert parse(form("qwen3", "hermes"), text, size) == expected


def test_a_thought_that_the_prompt_began():
    qwen = form("qwen3", "hermes")
    assert parse(qwen, "Hm.\n</think>\n\nYes", reasoning_is_open=True) == [Reasoning("Hm."), Content("Yes")]
    assert parse(qwen, "Hm.\n", reasoning_is_open=True) == [Reasoning("Hm.\n")]
    assert qwen.reasoning.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not qwen.reasoning.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
