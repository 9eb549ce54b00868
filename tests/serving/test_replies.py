"""Replies in OpenAI's form: parts of a stream and whole messages, of calls and thoughts in the forms of families."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import pytest

from inferplane.dialogue.replies.catalog import FORMS, choose_form
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.engine import Delta, SamplingParams
from inferplane.engine.sampling.grammars import JSON_OPTIONS
from inferplane.errors import UsageError
from inferplane.serving.admission import Deadline, GenerateCall
from inferplane.serving.chat.call_rules import demand_calls, tag_calls
from inferplane.serving.chat.custom_input import InputReader
from inferplane.serving.chat.rendering import ChatRendering
from inferplane.serving.chat.reply import JoinedReply, ReplyPlan, ReplyReader
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat.tools import ToolPlan, plan_tools
from inferplane.serving.errors import ApiError
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import GeneratedChoice
from inferplane.serving.wire import validate

TOOLS: dict[str, Any] = {"get": {"type": "object"}, "put": {"type": "object"}}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
USER = [{"role": "user", "content": "x"}]


def form(name: str) -> ReplyForm:
    return next(found for found in FORMS if found.name == name)


PLAIN, QWEN, KIMI, CODER = form("json"), form("qwen3"), form("kimi_k2"), form("qwen3_coder")
AUTO = ToolPlan("auto", TOOLS)


def read(plan: ReplyPlan, text: str, size: int = 0) -> JoinedReply:
    """The reply that a text is, cut into pieces of some size; 0: whole."""
    reader, deltas = ReplyReader(plan), []
    for i in range(0, len(text), size or max(len(text), 1)):
        deltas += reader.feed(text[i : i + (size or len(text))])
    return JoinedReply.of([*deltas, *reader.end()])


def calls_of(reply: JoinedReply) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in reply.calls]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("Hello, world", "Hello, world", []),
        ('{"name": "get", "arguments": {"a": 1}}', "", ["get"]),
        ('{"name": "get", "parameters": {}}', "", ["get"]),
        ('{"name": "get", "parameters": {}}; {"name": "put", "parameters": {}}', "", ["get", "put"]),
        ('[{"name": "get", "arguments": {}}, {"name": "put", "arguments": {}}]', "", ["get", "put"]),
        ('<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', "", ["get"]),
        ('I look. <tool_call>{"name": "get", "arguments": {}}</tool_call>', "I look. ", ["get"]),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            ["get"],
        ),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"name": "get", "arguments": [1]}', '{"name": "get", "arguments": [1]}', []),
        ('{"a": 1}', '{"a": 1}', []),
        ("{", "{", []),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>broken", "<tool_call>broken", []),
    ],
)
def test_content_and_calls(text, content, names, size):
    reply = read(ReplyPlan(AUTO, PLAIN), text, size)
    assert (reply.content, [name for name, _ in calls_of(reply)]) == (content, names)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls_of(reply))


def test_content_is_not_held_back_longer_than_it_must():
    reader = ReplyReader(ReplyPlan(AUTO, PLAIN))
    assert reader.feed("Hello") == [{"content": "Hello"}]
    assert reader.feed(" <tool") == [{"content": " "}]
    assert reader.feed(" box") == [{"content": "<tool box"}]


@pytest.mark.parametrize("size", [0, 1])
def test_a_thought_is_told_apart_and_may_speak_of_calls(size):
    call = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    reply = read(ReplyPlan(AUTO, QWEN), f"<think>\nShall I write {call}?\n</think>\n\nYes.\n{call}", size)
    assert reply.reasoning == f"Shall I write {call}?"
    assert reply.content == "Yes." and calls_of(reply) == [("get", "{}")]
    opened = ReplyPlan(AUTO, QWEN, reasoning_is_open=True)
    reply = read(opened, "Hm.</think>Yes.", size)
    assert (reply.reasoning, reply.content, reply.calls) == ("Hm.", "Yes.", [])
    reply = read(ReplyPlan(AUTO, QWEN, reasoning_is_open=True, shows_reasoning=False), "Hm.</think>Yes.", size)
    assert (reply.reasoning, reply.content) == ("", "Yes.")


# ------------------------------------------------------------------ forced calls


def forced(tools: ToolPlan, own: ReplyForm = QWEN, **more: Any) -> ReplyPlan:
    return ReplyPlan(tools, choose_form(own, tools="json"), is_bare=tools.mode == "named", **more)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[", []),
        ('[{"na', []),
        ('[{"name": "ge', []),
        ('[{"name": "get", "arguments": ', [("get", "")]),
        ('[{"name": "get", "arguments": {', [("get", "")]),
        ('[{"name": "get", "arguments": {"a": [1, "x', [("get", '{"a": [1, "x')]),
        ('[{"name": "get", "arguments": {"a": 1}}', [("get", '{"a": 1}')]),
        (
            '[ {"name": "get", "arguments": {"a": 1}} , {"name" : "get", "arguments" : {"b',
            [("get", '{"a": 1}'), ("get", '{"b')],
        ),
    ],
)
def test_demanded_calls_that_are_cut_off_are_calls_as_far_as_they_came(text, calls):
    for size in (0, 1):
        reply = read(forced(ToolPlan("required", TOOLS)), text, size)
        assert (reply.content, calls_of(reply)) == ("", calls)


@pytest.mark.parametrize("size", [0, 1])
def test_what_a_named_function_is_called_with_is_the_text_after_the_thought(size):
    plan = forced(ToolPlan("named", {"get": TOOLS["get"]}, "get"))
    assert calls_of(read(plan, '{"a": 1}', size)) == [("get", '{"a": 1}')]
    reply = read(plan, '<think>Well.</think>\n{"a": 1}', size)
    assert (reply.reasoning, reply.content, calls_of(reply)) == ("Well.", "", [("get", '{"a": 1}')])
    assert calls_of(read(plan, "", size)) == [("get", "")]


def test_what_required_tools_demand():
    constraint = ToolPlan("required", TOOLS, parallel=False).constraint()
    assert constraint["json_schema"]["maxItems"] == constraint["json_schema"]["minItems"] == 1
    assert ToolPlan("named", TOOLS, "get").constraint() == {"json_schema": {"type": "object"}}
    twice = '<tool_call>{"name": "get", "arguments": {}}</tool_call>' * 2
    for parallel, calls in ((False, 1), (True, 2)):
        assert len(read(ReplyPlan(ToolPlan("auto", TOOLS, parallel=parallel), PLAIN), twice).calls) == calls


def test_schemas_of_tools_may_refer_to_themselves():
    """With several tools in one schema, each still finds its own definitions, and `#` is the tool's schema."""
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "p": {"$ref": "#/$defs/P"}, "d": {"const": {"$ref": "#"}}},
    }
    tree["properties"]["default"] = {"$ref": "#/$defs/P"}  # a name, not a default
    tree |= {"$defs": {"P": {"type": "integer"}}, "required": ["p"], "additionalProperties": False}
    other = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "string"}}}
    schema = ToolPlan("required", {"tree": tree, "other": other}).constraint()["json_schema"]
    check = jsonschema.Draft202012Validator(schema)
    for arguments in ({"p": 1, "default": 2}, {"p": 1, "child": {"p": 2}}, {"p": 1, "d": {"$ref": "#"}}):
        assert check.is_valid([{"name": "tree", "arguments": arguments}]), arguments
    for arguments in ({"p": "x"}, {"p": 1, "default": "x"}, {"p": 1, "child": {}}, {"p": 1, "child": [1]}):
        assert not check.is_valid([{"name": "tree", "arguments": arguments}]), arguments
    assert check.is_valid([{"name": "other", "arguments": {"p": "x"}}])
    make = llguidance.LLMatcher
    named = ToolPlan("required", {"named": {**other, "$id": "http://example.org/tool"}}).constraint()["json_schema"]
    for compiled in (schema, named):
        grammar = make.grammar_from_json_schema(json.dumps(compiled), overrides=JSON_OPTIONS)
        assert make.validate_grammar(grammar) == ""


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar allows a whole text."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, grammar)
    assert not matcher.get_error()
    data = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TWO = {"get": NUMBER, "put": {"type": "object"}}
GET, PUT = '{"name": "get", "arguments": {"n": 7}}', '{"name": "put", "arguments": {"any": ["x", {}]}}'


def test_calls_that_have_begun_follow_a_rule():
    plan = ToolPlan("auto", TWO)
    (tag,) = tag_calls(QWEN, plan, {})
    assert tag.trigger == "<tool_call>"
    for text in (f"\n{GET}\n</tool_call>", f"{PUT}</tool_call>"):
        assert accepts(tag.grammar, text), text
    for text in ('{"name": "other", "arguments": {}}', '{"name": "get", "arguments": {"n": "x"}}', "Sorry", "[]"):
        assert not accepts(tag.grammar, f"{text}</tool_call>"), text
    (kimi,) = tag_calls(KIMI, plan, {})
    call = '<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'
    assert accepts(kimi.grammar, f"{call}<|tool_calls_section_end|>")
    assert tag_calls(PLAIN, plan, {}) == tag_calls(ReplyForm("none"), plan, {}) == ()
    long = ToolPlan("auto", {"get": {"type": "object", "description": "x" * 70_000}})
    assert tag_calls(QWEN, long, {}) == ()


def test_demanded_calls_are_in_the_form_of_the_family():
    grammar = (demand_calls(QWEN, ToolPlan("required", TWO), {}) or {})["grammar"]
    one, two = f"<tool_call>\n{GET}\n</tool_call>", f"<tool_call>\n{PUT}\n</tool_call>"
    assert accepts(grammar, one) and accepts(grammar, f"{one}\n{two}")
    assert not accepts(grammar, GET) and not accepts(grammar, "")
    for plan in (ToolPlan("required", TWO, parallel=False), ToolPlan("named", {"get": NUMBER}, "get")):
        grammar = (demand_calls(QWEN, plan, {}) or {})["grammar"]
        assert accepts(grammar, one) and not accepts(grammar, f"{one}\n{one}")
        reply = read(ReplyPlan(plan, QWEN), one, 1)
        assert calls_of(reply) == [("get", '{"n": 7}')]
    assert demand_calls(PLAIN, ToolPlan("required", TWO), {}) is None
    assert demand_calls(QWEN, planned(tool_choice={"type": "custom", "custom": {"name": "patch"}}), {}) is None


@pytest.mark.parametrize(("is_optional", "tries"), [(True, 2), (False, 1)])
def test_a_rule_that_the_engine_refuses_is_left_out_unless_a_tool_is_strict(is_optional, tries):
    submitted = []

    class Refusing:
        """Refuses structural tags, as an engine whose tokenizer no grammar can follow."""

        async def feed(self, receive, prompt, params, name, *, on_released, **more):
            submitted.append(params.structural_tags)
            on_released()
            if params.structural_tags:
                raise UsageError("SamplingParams: structural_tags: no.")
            receive(Delta("x", [1], "stop"))

    async def run() -> list[str]:
        params = SamplingParams(structural_tags=tag_calls(QWEN, AUTO, {}))
        call = GenerateCall([[1]], has_optional_tags=is_optional, words={"structural_tags": "tools"})
        generation = Generation(Refusing(), call, [[1]], [params], "j", Deadline(60))  # type: ignore[arg-type]
        generation.start()
        released: list[int] = []
        try:
            return [piece.delta.text async for piece in generation.pieces()]
        finally:
            await generation.close(lambda: released.append(1))
            assert released == [1]

    if is_optional:
        assert asyncio.run(run()) == ["x"]
    else:
        with pytest.raises(ApiError) as refused:
            asyncio.run(run())
        assert (refused.value.status, refused.value.param) == (400, "tools")
    assert len(submitted) == tries


# ------------------------------------------------------------------ which tools


def planned(**fields: Any) -> ToolPlan:
    return plan_tools(validate(ChatRequest, {"messages": USER, "tools": [*FUNCTIONS, PATCH], **fields}))


def test_forms_of_tool_choice():
    get, patch = {"type": "function", "function": {"name": "get"}}, {"type": "custom", "custom": {"name": "patch"}}
    assert planned().mode == "auto" and list(planned().tools) == ["get", "put", "patch"]
    assert planned(tool_choice="none").mode == "none"
    assert planned(tool_choice="required").mode == "required"
    assert (planned(tool_choice=get).mode, planned(tool_choice=get).named) == ("named", "get")
    assert (planned(tool_choice=patch).mode, planned(tool_choice=patch).named) == ("named", "patch")
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [get, patch]}}
        plan = planned(tool_choice=allowed)
        assert (plan.mode, list(plan.tools), list(plan.custom)) == (mode, ["get", "patch"], ["patch"])


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "function": {"name": "none"}}, "tool_choice"),
        ({"type": "function", "function": {"name": "patch"}}, "tool_choice"),
        ({"type": "custom", "custom": {"name": "get"}}, "tool_choice"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
            },
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice.allowed_tools.mode"),
        ("some", "tool_choice"),
    ],
)
def test_a_tool_that_is_not_there_cannot_be_chosen(choice, param):
    with pytest.raises(ApiError) as refused:
        planned(tool_choice=choice)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_schemas_that_are_not_strict_are_best_effort_and_said_to_be():
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": loose}}
    plan = planned(tools=[tool])
    assert plan.not_enforced == ("uniqueItems",) and "uniqueItems" not in str(plan.tools)
    strict = planned(tools=[{"type": "function", "function": {**tool["function"], "strict": True}}])
    assert strict.not_enforced == () and strict.tools["f"] == loose


# ------------------------------------------------------------------ custom tools


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "text", ["", "x", 'a "quoted" \\ line\nand\ttab', "é€😀 \u2028", "{}", "\x00\x1f", "ends with \\"]
)
def test_the_input_of_a_custom_tool_is_decoded_as_it_comes(text, size):
    for ascii_only in (True, False):
        for spaces in ("", " "):
            arguments = f'{spaces}{{"input":{spaces}{json.dumps(text, ensure_ascii=ascii_only)}}}'
            reader = InputReader()
            pieces = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
            assert "".join(pieces) + reader.end() == text


@pytest.mark.parametrize("arguments", ['{"other": 1}', '{"input": 5}', "{}", '{"inp": ""}'])
def test_other_arguments_of_a_custom_tool_are_passed_on(arguments):
    for size in (1, 100):
        reader = InputReader()
        pieces = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        assert "".join(pieces) + reader.end() == arguments


@pytest.mark.parametrize("size", [0, 1])
def test_calls_of_custom_tools(size):
    plan = planned()
    text = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    reply = read(ReplyPlan(plan, QWEN), text, size)
    assert [(c["type"], c["custom"]) for c in reply.calls] == [("custom", {"name": "patch", "input": "a\nb"})]
    named = planned(tool_choice={"type": "custom", "custom": {"name": "patch"}})
    reply = read(forced(named), "<think>\n</think>\n*** any text", size)
    assert [c["custom"] for c in reply.calls] == [{"name": "patch", "input": "*** any text"}]


def test_the_grammar_of_a_custom_tool_is_enforced_where_it_can_be():
    choice = {"type": "custom", "custom": {"name": "sum"}}
    for syntax, definition, field in (("regex", "[0-9+]+", "regex"), ("lark", 'start: "1+1"', "grammar")):
        grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        tool = {"type": "custom", "custom": {"name": "sum", "format": grammar}}
        assert planned(tools=[tool], tool_choice=choice).constraint() == {field: definition}
        auto = planned(tools=[tool])
        assert auto.not_enforced == (("custom.format",) if syntax == "lark" else ())
        assert ("pattern" in str(auto.tools)) == (syntax == "regex")
    assert planned(tool_choice={"type": "custom", "custom": {"name": "patch"}}).constraint() == {}


# ------------------------------------------------------------------ ids, streams


def test_ids_of_calls():
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{}"
    section += "<|tool_call_end|><|tool_calls_section_end|>"
    assert read(ReplyPlan(AUTO, KIMI), section).calls[0]["id"] == "functions.get:3"
    required = ReplyPlan(
        ToolPlan("required", TOOLS),
        choose_form(KIMI, tools="json"),
        id_form="functions.{name}:{index}",
        num_earlier_calls=2,
    )
    assert read(required, '[{"name": "get", "arguments": {}}]').calls[0]["id"] == "functions.get:2"
    own = read(ReplyPlan(AUTO, QWEN), '<tool_call>{"name": "get", "arguments": {}}</tool_call>').calls[0]["id"]
    assert len(own) == 9 and own.isalnum()


class Stream:
    """A stream of one choice, rendered piece by piece."""

    def __init__(self, plan: ReplyPlan, **fields: Any) -> None:
        request = validate(ChatRequest, {"messages": USER, "stream": True, **fields})
        self.generation: Any = SimpleNamespace(
            num_choices=1,
            prompts=[[1, 2]],
            call=SimpleNamespace(n=1),
            prompt_tokens=2,
            completion_tokens=0,
            cached_tokens=0,
            reasoning_tokens=0,
        )
        model: Any = SimpleNamespace(fingerprint="", token_text=None)
        self.rendering = ChatRendering(request, plan, model, "m", "1")

    def chunks(self, pieces: list[str], reason: Any = "stop") -> list[list[dict[str, Any]]]:
        """The choices of the chunks that each piece leads to; the first are the stream's opening."""
        out = [self.rendering.opening(self.generation)]
        for i, text in enumerate(pieces):
            is_last = i == len(pieces) - 1
            delta = Delta(text, [i], reason if is_last else None)
            out.append(self.rendering.piece(self.generation, Piece(0, delta)))
        lines = [[line.removeprefix(b"data: ") for line in part.splitlines() if line] for part in out]
        return [[json.loads(line)["choices"][0] for line in part] for part in lines]


ARGUMENTS = json.dumps({"city": "Bergen", "days": [1, 2, 3], "note": 'bring "rain" coats, and a long text ' * 3})
CASES = {
    "auto, Hermes": (AUTO, QWEN, f'<tool_call>\n{{"name": "get", "arguments": {ARGUMENTS}}}\n</tool_call>'),
    "auto, JSON": (AUTO, PLAIN, f'{{"name": "get", "arguments": {ARGUMENTS}}}'),
    "auto, Kimi": (
        AUTO,
        KIMI,
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "required": (ToolPlan("required", TOOLS), None, f'[{{"name": "get", "arguments": {ARGUMENTS}}}]'),
    "named": (ToolPlan("named", {"get": TOOLS["get"]}, "get"), None, ARGUMENTS),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_stream_within_three_tokens_of_where_they_begin(case):
    """For all three kinds of choice. A token is a word here, as in real vocabularies, or a mark."""
    tools, own, text = CASES[case]
    plan = forced(tools) if own is None else ReplyPlan(tools, own)
    begin = text.index(ARGUMENTS)
    pieces, at = [], 0
    for mark in ("<tool_call>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"):
        if text.startswith(mark, at) or mark in text[:begin]:
            end = text.index(mark) + len(mark)
            pieces.append(text[at:end])
            at = end
    cuts = [at, *(i for i in range(at + 1, len(text)) if text[i] in ' "{}:,\\'), len(text)]
    pieces += [text[i:j] for i, j in pairwise(cuts)]
    chunks = Stream(plan).chunks(pieces)
    deltas = [[call["function"] for c in part for call in c["delta"].get("tool_calls", ())] for part in chunks[1:]]
    first = next(i for i, found in enumerate(deltas) if any(f["arguments"] for f in found))
    so_far = len("".join(pieces[: first + 1]))
    begun = next(i for i in range(len(pieces)) if len("".join(pieces[: i + 1])) > begin)
    assert first - begun < 3 and so_far < begin + 10
    assert sum(any(f["arguments"] for f in found) for found in deltas) > 20
    assert "".join(f["arguments"] for found in deltas for f in found) == ARGUMENTS
    heads = [f for found in deltas for f in found if "name" in f]
    assert [f["name"] for f in heads] == ["get"]
    last = chunks[-1][-1]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert [c["finish_reason"] for part in chunks for c in part].count(None) == sum(map(len, chunks)) - 1


def test_a_stream_and_its_whole_have_the_same_parts():
    call = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nHm, é.\n</think>\n\nYes.\n{call}\n{call}"
    plan = ReplyPlan(AUTO, QWEN)
    stream = Stream(plan)
    deltas = [c["delta"] for part in stream.chunks(list(text)) for c in part]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    whole = stream.rendering.full_response(stream.generation, [GeneratedChoice(text, [1], "stop")])
    message = whole["choices"][0]["message"]
    assert "".join(d.get("reasoning", "") for d in deltas) == message["reasoning"] == message["reasoning_content"]
    assert message["reasoning"] == "Hm, é." and message["content"] == "Yes."
    assert "".join(d.get("content", "") for d in deltas) == "Yes."
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "get", "arguments": '{"a": 1}'}] * 2
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_plain_reply_has_neither_thoughts_nor_calls():
    stream = Stream(ReplyPlan(ToolPlan(), PLAIN))
    text = '<think>a</think><tool_call>{"name": "get", "arguments": {}}</tool_call>'
    chunks = stream.chunks([text[:20], text[20:]], "length")
    assert "".join(c["delta"].get("content", "") for part in chunks for c in part) == text
    assert chunks[-1][-1]["finish_reason"] == "length"
    whole = stream.rendering.full_response(stream.generation, [GeneratedChoice(text, [1], "stop")])
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert "completion_tokens_details" not in whole["usage"]


def test_token_ids_and_log_probabilities_come_once_for_a_piece_with_several_parts():
    stream = Stream(ReplyPlan(AUTO, QWEN), return_token_ids=True)
    chunks = stream.chunks(["<think>a</think>", "b", ""])
    assert [c.get("token_ids") for part in chunks[1:] for c in part if c["finish_reason"] is None] == [[0], [1], [2]]
