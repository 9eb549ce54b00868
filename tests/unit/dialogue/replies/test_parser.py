"""What a reply is parsed into, however its text is cut."""

from __future__ import annotations

import json

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


TRUNCATED = [
    ("[", []),
    ('[{"na', []),
    ('[{"name": "ge', []),
    ('[{"name": "get", "arguments": ', [("get", "")]),
    ('[{"name": "get", "arguments": {"a": [1, "x', [("get", '{"a": [1, "x')]),
    ('[{"name": "get", "arguments": {"a": 1}}', [("get", '{"a": 1}')]),
    (
        '[ {"name": "get", "arguments": {"a": 1}} , {"name" : "get", "arguments" : {"b',
        [("get", '{"a": 1}'), ("get", '{"b')],
    ),
]


@pytest.mark.parametrize("mode", ["required", "named"])
@pytest.mark.parametrize(("text", "calls"), TRUNCATED)
def test_demanded_calls_that_end_early_are_calls_as_far_as_they_came(text, calls, mode):
    events = parse(form("none", "json"), text, mode=mode)
    assert not [event for event in events if isinstance(event, Content)]
    starts = [event for event in events if isinstance(event, CallStart)]
    pieces = {event.index: event.text for event in events if isinstance(event, Arguments)}
    assert [(start.name, pieces.get(start.index, "")) for start in starts] == calls


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": [1', call("get", '{"a": [1')),
        ("hermes", '<tool_call>{"name": "get"', [Content('<tool_call>{"name": "get"')]),
        ("hermes", ONE[:-4], call("get", '{"a": 1}')),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=s>\nso f", call("get", '{"s": "so f')),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=a>\n1", call("get", '{"a": "1')),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n<par", call("get", '{"a": 1')),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=wo", call("get", '{"wo')),
        ("pythonic", '[get(a=1, s="x', call("get", '{"a": 1, "s": "x')),
        ("pythonic", "[get(a=1, s", call("get", '{"a": 1, "s')),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_arg", None),
    ],
)
def test_calls_that_end_early(name, text, expected):
    assert parse(form("none", name), text, 1) == (expected or [Content(text)])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "no", "arguments": {}}</tool_call>!', None),
        ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "get", "arguments": {a: 1}}</tool_call>', None),
        ("hermes", '{"a": 1}', None),
        ("json", "get(a=1)", None),
        ("json", "[" * 5000, None),
        ("json", "{", None),
        (
            "hermes",
            f'<tool_call>{{"name": "no"}}</tool_call>\n{ONE}',
            [Content('<tool_call>{"name": "no"}</tool_call>'), *call("get", '{"a": 1}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "get", "arguments": {"a": 1}</tool_call>.',
            [*call("get", '{"a": 1}'), Content(".")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "get", "arguments": {"a": "1\n2"}}</tool_call>',
            call("get", '{"a": "1\\n2"}'),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get>so <parameter=a>1</parameter></function></tool_call>",
            [CallStart(0, "get", ""), Arguments(0, "{"), Content("so "), Arguments(0, '"a": 1}')],
        ),
        ("qwen3_coder", "<tool_call><function=no></function></tool_call>", None),
        (
            "qwen3_coder",
            "<tool_call><function=get><parameter=s>a</parameter>b</parameter></function></tool_call>",
            call("get", '{"s": "a</parameter>b"}'),
        ),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no<｜tool▁sep｜>{}", None),
        ("openai", "<|channel|>w1<|message|>x<|end|>", [Content("<|channel|>w1<|message|>x")]),
    ],
)
def test_what_is_no_call_is_content(name, text, expected):
    assert parse(form("none", name), text) == parse(form("none", name), text, 1) == (expected or [Content(text)])


def test_content_is_passed_on_at_once():
    parser = ReplyParser(form("none", "hermes"), TOOLS)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <tool") == [Content(" ")]
    assert parser.feed(" box") == [Content("<tool box")]


@pytest.mark.parametrize(
    ("name", "before", "pieces"),
    [
        ("hermes", '<tool_call>\n{"name": "get", "arguments":', [' {"', "s", '": "', "long", " text"]),
        ("json", '{"name": "get", "arguments":', [' {"', "s", '": "', "long", " text"]),
        ("qwen3_coder", "<tool_call>\n<function=get", [">", "\n", "<parameter=", "s", ">\n", "long", " text"]),
        ("glm45", "<tool_call>get", ["<arg_key>", "s", "</arg_key>", "<arg_value>", "long", " text"]),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get",
            ["<｜tool▁sep｜>", '{"', "s", '": "', "long"],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:",
            ["0", "<|tool_call_argument_begin|>", '{"'],
        ),
        ("pythonic", "[get(", ["s", '="', "long", " text"]),
        ("openai", "<|channel|>commentary to=functions.get", ["<|message|>", '{"', "s", '": "', "long"]),
    ],
)
def test_arguments_stream_from_the_third_token_behind_the_name_on(name, before, pieces):
    parser = ReplyParser(form("none", name), TOOLS)
    assert parser.feed(before) == []
    events = [parser.feed(piece) for piece in pieces]
    first = next(i for i, found in enumerate(events) if any(isinstance(event, Arguments) for event in found))
    assert first < 3 and isinstance(events[first][0], CallStart)
    silent = ("\n", "<parameter=", "s", "</arg_key>", "<arg_value>")
    assert all(events[i] or pieces[i] in silent for i in range(first + 1, len(pieces)))


def test_without_tools_and_in_mode_none_a_call_is_content():
    assert parse(form("none", "hermes"), ONE, mode="none") == [Content(ONE)]
    parser = ReplyParser(form("none", "hermes"))
    assert join_events([*parser.feed(ONE), *parser.end()]) == [Content(ONE)]


HEADER, FINAL = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>", "<|channel|>final<|message|>"
THOUGHT, START = "<|channel|>analysis<|message|>Hm.", "<|start|>assistant"


@pytest.mark.parametrize("size", [1, 5, 10**6])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|end|>{START}{FINAL}Hi<|return|>", [Content("Hi")]),
        (f"{THOUGHT}<|end|><|end|>{START}{FINAL}Hi<|return|>", [Reasoning("Hm."), Content("Hi")]),
        (f"{THOUGHT}<|end|>{START}<|channel|><|end|>{START}{FINAL}Hi", [Reasoning("Hm."), Content("Hi")]),
        (f"{THOUGHT}<|end|>{START}<|channel|>comm<|end|>{FINAL}Hi", [Reasoning("Hm."), Content("Hi")]),
        (f"<|channel|>anal{START}{FINAL}Hi", [Content("Hi")]),
        (f"<|channel|>anal{FINAL}Hi", [Content("Hi")]),
        (
            f'{THOUGHT}<|end|>{START}{FINAL}{HEADER}{{"a": 1}}<|call|>',
            [Reasoning("Hm."), *call("get", '{"a": 1}')],
        ),
        (f"{THOUGHT} A <|channel|> is one.<|end|>{START}{FINAL}Hi", None),
        (f"{FINAL}A <|channel|> is one.<|return|>", [Content("A <|channel|> is one.")]),
        (f"{THOUGHT}<|end|>{START}", [Reasoning("Hm.")]),
        (f"{THOUGHT}<|end|>{START}<|channel|>fin", [Reasoning("Hm.")]),
        (f"{THOUGHT}<|end|>{START} to=functions.get<|channel|>commentary js", [Reasoning("Hm.")]),
        (f"{THOUGHT}<|end|>{START}<|channel|>commentary to=functions.ge", [Reasoning("Hm.")]),
        (f"{FINAL}<|channel|>Hm", [Content("<|channel|>Hm")]),
    ],
)
def test_messages_that_are_cut_off_or_forced(text, expected, size):
    thought = [Reasoning("Hm. A <|channel|> is one."), Content("Hi")]
    assert parse(form("openai", "openai"), text, size) == (expected or thought)


def test_a_prompt_may_begin_the_thought_with_another_mark():
    seed = form("seed_oss", "seed_oss")
    assert seed.reasoning.is_open_after("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>")
    assert not seed.reasoning.is_open_after("<seed:bos>assistant\n")
    text = "<seed:tool_call>\n<function=get>\n<parameter=s>a\n</parameter>\n</function>\n</seed:tool_call>"
    assert parse(seed, text, 1) == call("get", '{"s": "a\\n"}')


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"a\/b", "a/b"),
        (r"\ud83d\ude00!", "\U0001f600!"),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"\ud83dx", r"\ud83dx"),
        (r"\ud83d\u0041", r"\ud83dA"),
        (r"\u00e9", "é"),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_escapes_of_texts_in_python(text, value, size):
    _, arguments = parse(form("none", "pythonic"), f'[get(s="{text}")]', size)
    assert json.loads(arguments.text) == {"s": value}


@pytest.mark.parametrize(
    ("between", "tools"),
    [
        ("<|tool_calls_section_begin|> is its mark.", True),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.no:0<|tool_call_argument_begin|>{}", True),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{}", False),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 400])
def test_what_is_no_call_stays_in_the_thought(between, tools, size):
    """Also where a call would end the thought: in Kimi's replies."""
    text = f"<think>A {between} B</think>C"
    parser = ReplyParser(form("kimi_k2", "kimi_k2"), TOOLS if tools else None)
    events = [e for i in range(0, len(text), size) for e in parser.feed(text[i : i + size])] + parser.end()
    assert join_events(events) == [Reasoning(f"A {between} B"), Content("C")]


@pytest.mark.parametrize("size", [1, 5, 400])
def test_a_call_ends_the_thought_and_the_mark_of_its_end_is_no_content(size):
    """As Kimi K2.5 writes it now and then."""
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{}"
    text = f"<think>A\n{section}<|tool_call_end|><|tool_calls_section_end|>\n</think>\nC"
    parser = ReplyParser(form("kimi_k2", "kimi_k2"), TOOLS)
    events = [e for i in range(0, len(text), size) for e in parser.feed(text[i : i + size])] + parser.end()
    assert join_events(events) == [Reasoning("A"), *call("get", "{}", call_id="functions.get:0"), Content("C")]
