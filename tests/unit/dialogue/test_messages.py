"""One form of messages, whichever interface they came through."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest

from inferplane.dialogue.messages import MessageError, normalize_messages
from inferplane.dialogue.template import Template
from inferplane.engine import LLM
from inferplane.errors import UsageError


def user(content):
    return [{"role": "user", "content": content}]


def part(text):
    return {"type": "text", "text": text}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(**function):
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}]


@pytest.mark.parametrize(
    ("messages", "want"),
    [
        (user([part("a"), part("b")]), user("a\nb")),
        (user([part("a")]), user("a")),
        (user((part("a"), part(""))), user("a\n")),
        (user([]), user("")),
        (user(None), user("")),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [{"role": "assistant", "content": "no"}],
        ),
        ([{"role": "developer", "content": "x", "name": None}], [{"role": "system", "content": "x"}]),
        (
            [{"role": "assistant", "content": "x", "reasoning": "r", "refusal": None}],
            [{"thinking": "r", "role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"}],
        ),
        (
            [{"role": "tool", "content": [part("4")], "tool_call_id": "1", "cached": True}],
            [{"role": "tool", "content": "4", "tool_call_id": "1", "cached": True}],
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
            [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        ),
        *(
            (
                [{"role": "assistant", "refusal": "no", **rest}],
                [{"role": "assistant", "content": "no", "refusal": "no"}],
            )
            for rest in ({}, {"content": None}, {"content": ""}, {"content": [], "tool_calls": None})
        ),
        ([{"role": "assistant", "tool_calls": []}], [{"role": "assistant", "content": ""}]),
        ([{"role": "assistant", "content": "x", "tool_calls": None}], [{"role": "assistant", "content": "x"}]),
    ],
)
def test_forms(messages, want):
    assert normalize_messages(messages) == want


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("", "{}"),
        (" \n", "{}"),
        (None, "{}"),
        ({"x": "é"}, '{"x": "é"}'),
        ('{"x": 1', '{"x": 1'),
        ('{"x": 1}', '{"x": 1}'),
    ],
)
def test_arguments_of_calls_are_text(given, want):
    (message,) = normalize_messages(called(arguments=given))
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": want}}]


@pytest.mark.parametrize("rest", [{}, {"type": None}, {"type": "function"}, {"type": None, "id": None, "index": 0}])
def test_the_type_of_a_call_may_be_missing(rest):
    (message,) = normalize_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, **rest}]}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


BAD = [
    *(
        ([{"role": role, "refusal": refusal}], "messages[0].content", "lacks 'content'")
        for role, refusal in (("assistant", None), ("assistant", ""), ("assistant", 5), ("user", "no"))
    ),
    (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0]",
        "custom",
    ),
    (
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
        "Images are not supported",
    ),
    (user([part("a"), {"type": "input_audio", "input_audio": {}}]), "messages[0].content[1].type", "Audio are not"),
    (user([{"type": "image"}]), "messages[0].content[0].type", "Images"),
    (user([{"type": "video_url"}]), "messages[0].content[0].type", "Videos"),
    (user([{"type": "file"}]), "messages[0].content[0].type", "Files"),
    (user([{"type": "smell"}]), "messages[0].content[0].type", "smell"),
    (user([{"text": "a"}]), "messages[0].content[0]", "text"),
    (user(["a"]), "messages[0].content[0]", "'a'"),
    (user([{"type": "text"}]), "messages[0].content[0].text", "lacks 'text'"),
    (user([{"type": "text", "text": 5}]), "messages[0].content[0].text", "= 5"),
    (user(5), "messages[0].content", "= 5"),
    (user({"type": "text"}), "messages[0].content", "type"),
    (user(b"x"), "messages[0].content", "b'x'"),
    ([{"role": "king", "content": "x"}], "messages[0].role", "'king'"),
    ([*user("x"), {"role": "bot", "content": "x"}], "messages[1].role", "'bot'"),
    ([{"role": "user"}], "messages[0].content", "lacks 'content'"),
    ([{"role": "user", "content": "x", "images": ["i"]}], "messages[0].images", "Images"),
    ([{"role": "assistant", "content": "x", "audio": {"id": "1"}}], "messages[0].audio", "Audio"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "= 5"),
    ([{"role": "user", "content": "x", "mood": object()}], "messages[0].mood", "no JSON"),
    ([{"role": "tool", "content": "x", "tool_call_id": "x" * 257}], "messages[0].tool_call_id", "256"),
    ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls", "'f'"),
    ([{"role": "assistant", "tool_calls": ""}], "messages[0].tool_calls", "''"),
    ([{"role": "assistant", "content": "x", "tool_calls": False}], "messages[0].tool_calls", "False"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "messages[0].tool_calls[0]", "function"),
    (called(name=""), "messages[0].tool_calls[0].function.name", "name"),
    (called(arguments=5), "messages[0].tool_calls[0].function.arguments", "= 5"),
    ([], "messages", "[]"),
]


@pytest.mark.parametrize(("messages", "param", "says"), BAD)
def test_what_is_no_text_is_refused(messages, param, says):
    with pytest.raises(MessageError) as refused:
        normalize_messages(messages)
    assert refused.value.param == param and says in str(refused.value)


class Rendered(Exception):
    """What a chat template was given."""


def test_llm_chat_gets_the_same(monkeypatch):
    """No list of parts, and no picture, becomes the text of a prompt."""

    class Shown(Template):
        def render(self, *given):
            raise Rendered(super().render(*given))

    class Inputs:
        def template(self, source):
            return Shown("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})

    llm = SimpleNamespace(tokenizer=Inputs(), files=SimpleNamespace(config={}), stream=None)
    llm.plan_chat = partial(LLM.plan_chat, llm)
    for chat in (LLM.chat, LLM.stream_chat):
        with pytest.raises(Rendered, match=r"^<user>a\nb$"):
            chat(llm, user([part("a"), part("b")]))
        for messages, _, says in BAD:
            with pytest.raises(UsageError) as refused:
                chat(llm, messages)
            assert says in str(refused.value)


@pytest.mark.parametrize(
    ("message", "param", "known"),
    [
        ({"role": "assistant", "content": "x", "tool_cals": [CALL]}, "tool_cals", "tool_calls"),
        ({"role": "assistant", "content": "x", "toolCalls": [CALL]}, "toolCalls", "tool_calls"),
        ({"role": "user", "content": "x", "nmae": "bob"}, "nmae", "name"),
        ({"role": "user", "content": "x", "Name": "bob"}, "Name", "name"),
        ({"role": "assistant", "tool_calls": [CALL], "conten": "x"}, "conten", "content"),
        ({"role": "tool", "content": "x", "tool_cal_id": "1"}, "tool_cal_id", "tool_call_id"),
        ({"role": "assistant", "content": "x", "reasoning_contnet": "y"}, "reasoning_contnet", "reasoning_content"),
    ],
)
def test_a_mistyped_key_is_refused_with_the_known_one(message, param, known):
    with pytest.raises(MessageError) as caught:
        normalize_messages([*user("x"), message])
    assert caught.value.param == f"messages[1].{param}" and repr(known) in caught.value.remedy
    assert normalize_messages([*user("x"), {**message, param: None}])


@pytest.mark.parametrize("key", ["argumets", "Arguments", "parameters", "args", "input"])
def test_arguments_of_a_call_under_another_name_are_refused(key):
    with pytest.raises(MessageError) as caught:
        normalize_messages(called(**{key: "{}"}))
    assert caught.value.param == f"messages[0].tool_calls[0].function.{key}"
    assert "'arguments'" in caught.value.remedy
    assert normalize_messages(called(**{key: "{}", "arguments": "{}"}))


@pytest.mark.parametrize("key", ["prefix", "partial"])
def test_a_message_that_is_to_be_continued_is_refused_by_name(key):
    reply = {"role": "assistant", "content": "x"}
    with pytest.raises(MessageError, match=rf"{key} is not supported.*continue_final_message") as caught:
        normalize_messages([*user("x"), {**reply, key: True}])
    assert caught.value.param == f"messages[1].{key}"
    assert normalize_messages([*user("x"), {**reply, key: False}]) == [*user("x"), reply]


def test_a_function_call_is_refused():
    with pytest.raises(MessageError, match=r"function_call is not supported.*tool_calls"):
        normalize_messages([{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}])


@pytest.mark.parametrize("key", ["context", "contents", "usage", "date", "time", "cache_control", "x", "weight"])
def test_other_keys_are_for_the_template(key):
    assert normalize_messages([{"role": "user", "content": "x", key: "y"}])[0][key] == "y"


def test_mistyped_keys_cost_little_time():
    messages = [{"role": "user", "content": "x", **{f"k{i}x{k}": 1 for k in range(40)}} for i in range(1500)]
    begun = time.process_time()
    normalize_messages(messages)
    assert time.process_time() - begun < 5
