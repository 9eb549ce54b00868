"""Conversations in Python: thoughts apart from answers, limits of thoughts, several conversations, calls of tools."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from dataclasses import replace
from functools import partial

import pytest
from tokenizers import AddedToken

pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")

from inferplane import AsyncLLM, ChatResult, SamplingParams
from inferplane.cli.screen import Screen
from inferplane.cli.signals import Interrupt
from inferplane.cli.verbs.chat import Conversation
from inferplane.dialogue.replies.catalog import FORMS
from inferplane.dialogue.template import Template
from inferplane.dialogue.tools import join_calls
from inferplane.engine.clients.chat import ChatReader
from inferplane.engine.request.results import Delta, Result, Timings
from inferplane.engine.request.text import Tokenizer
from inferplane.errors import InferplaneWarning, UsageError
from tests.e2e.test_reasoning import with_marks
from tests.e2e.tiny_llm import opened, write

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}\n<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("chat"), with_marks, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as made:
        yield made


def test_a_thought_with_a_limit_and_json_after_it(llm):
    params = SamplingParams(max_tokens=30, temperature=0, json_schema={"enum": ["yes", 12]})
    result = llm.chat(HELLO, params, thinking_token_budget=5)
    thought = llm.tokenizer.decode(result.token_ids[:5])
    assert result.reasoning == thought.strip("\n") and json.loads(result.text) in ("yes", 12)
    assert result.reasoning_tokens == 5 + len(llm.tokenizer.encode("\n</think>\n\n", special=False))
    assert result.message == {"role": "assistant", "content": result.text, "reasoning_content": result.reasoning}
    pieces = list(llm.stream_chat(HELLO, params, thinking_token_budget=5))
    assert "".join(p.reasoning for p in pieces) == result.reasoning
    assert "".join(p.text for p in pieces) == result.text and pieces[-1].reasoning_tokens == result.reasoning_tokens


def test_the_thought_is_turned_off_by_the_template(llm):
    result = llm.chat(HELLO, SamplingParams(max_tokens=10, temperature=0, regex="[ab]{3}"), thinking=False)
    assert llm.tokenizer._inner.decode(result.prompt_token_ids).endswith("<bot><think>\n\n</think>\n\n")
    assert (result.reasoning, result.reasoning_tokens) == ("", 0) and len(result.text) == 3
    same = llm.chat(HELLO, PARAMS, chat_template_kwargs={"enable_thinking": False})
    assert same.prompt_token_ids == result.prompt_token_ids


def test_several_conversations_are_one_batch(llm):
    others = [HELLO, [{"role": "user", "content": [{"type": "text", "text": "x"}]}]]
    found = llm.chat(others, PARAMS, thinking_token_budget=3)
    assert [r.token_ids for r in found] == [llm.chat(o, PARAMS, thinking_token_budget=3).token_ids for o in others]
    sampled = llm.chat(HELLO, SamplingParams(max_tokens=9, n=2, seed=1, ignore_eos=True), thinking_token_budget=3)
    assert len(sampled.samples) == 2 and all(sample.reasoning for sample in sampled.samples)


def test_a_message_is_continued(llm):
    begun = [*HELLO, {"role": "assistant", "content": "Once upon "}]
    plan = llm.plan_chat(begun, PARAMS, continue_final_message=True)
    assert llm.tokenizer._inner.decode(plan.prompt).endswith("<assistant>Once upon ") and not plan.reasoning_is_open


def test_each_call_has_an_id_of_its_own(llm):
    kimi = next(form for form in FORMS if form.name == "kimi_k2")
    plan = replace(llm.plan_chat(HELLO, PARAMS, tools=[TOOL]), form=kimi, reasoning_is_open=False)
    call = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    result = plan.finish(Result(text, [], "stop", Timings(0, 0, 0, 0, 0), []))
    assert [c["id"] for c in result.tool_calls] == ["functions.add:0", "functions.add:1"]


def test_another_template(llm):
    result = llm.chat(HELLO, PARAMS, chat_template="{{ messages[0].content }}!")
    assert result.prompt_token_ids == llm.tokenizer.encode("Hello!", special=False)
    assert result.text == llm.tokenizer.decode(result.token_ids) and not result.reasoning


def test_calls_of_tools(llm):
    """What a model may write, told apart whole and in pieces of any size."""
    plan = llm.plan_chat(HELLO, PARAMS, tools=[TOOL])
    prompt = llm.tokenizer._inner.decode(plan.prompt)
    assert prompt.startswith('<tools>[{"type": "function"') and plan.reasoning_is_open
    text = f"I add <tool_call>.\n</think>\n\nWell.\n{CALL}\n{CALL}"
    result = plan.finish(Result(text, [], "stop", Timings(0, 0, 0, 0, 0), []))
    assert (result.reasoning, result.text.strip()) == ("I add <tool_call>.", "Well.")
    assert [json.loads(c["function"]["arguments"]) for c in result.tool_calls] == [{"a": 1, "b": [2]}] * 2
    assert all(c["type"] == "function" and c["function"]["name"] == "add" and c["id"] for c in result.tool_calls)
    for size in (1, 3, 7):
        reader, pieces = ChatReader(plan), []
        cuts = [text[i : i + size] for i in range(0, len(text), size)]
        for i, cut in enumerate(cuts):
            pieces.append(reader.read(Delta(cut, [i], "stop" if i == len(cuts) - 1 else None)))
        assert "".join(p.reasoning for p in pieces) == result.reasoning
        assert "".join(p.text for p in pieces) == result.text
        calls = [c for p in pieces for c in p.tool_calls]
        for index in (0, 1):
            joined = "".join(c["function"]["arguments"] for c in calls if c["index"] == index)
            assert joined == result.tool_calls[index]["function"]["arguments"]
        assert [c["function"]["name"] for c in calls if "id" in c] == ["add", "add"]
    again = llm.plan_chat([*HELLO, result.message, {"role": "tool", "content": "3"}], PARAMS, tools=[TOOL])
    assert again.num_earlier_calls == 2 and '"name": "add"' in llm.tokenizer._inner.decode(again.prompt)
    hidden = llm.plan_chat(HELLO, PARAMS, tools=[TOOL], tool_choice="none")
    assert hidden.prompt == llm.plan_chat(HELLO, PARAMS).prompt and not hidden.rules.tools


SUM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
LIST = {"type": "object", "properties": {"of": {"enum": ["x"]}}, "required": ["of"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in (("sum", SUM), ("list", LIST))]
NAMED = {"type": "function", "function": {"name": "list"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("marks", ["<tool_call></think>", "</think>"])
def test_calls_that_are_demanded(llm, choice, marks):
    """In the form that the template shows, and in JSON alone where it shows none."""
    params = SamplingParams(max_tokens=480, temperature=0)
    options = {"tools": TOOLS, "tool_choice": choice, "chat_template": marks + "{{ messages[0].content or tools }}"}
    result = llm.chat(HELLO, params, thinking_token_budget=4, **options)
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in result.tool_calls]
    allowed = [("list", {"of": "x"}), *([("sum", {"a": 1}), ("sum", {"a": 2})] if choice == "required" else [])]
    assert calls and all(call in allowed for call in calls) and not result.text.strip()
    assert len(calls) == 1 or choice == "required"
    pieces = list(llm.stream_chat(HELLO, params, thinking_token_budget=4, **options))
    assert join_calls(c for p in pieces for c in p.tool_calls) == [
        {**call, "id": next(c["id"] for p in pieces for c in p.tool_calls if c["index"] == i and "id" in c)}
        for i, call in enumerate(result.tool_calls)
    ]
    assert "".join(p.reasoning for p in pieces) == result.reasoning


def with_calls():
    made = with_marks()
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return made


def test_a_call_that_begins_by_itself_is_one_of_the_tools(tmp_path):
    """In mode "auto" nothing forces a call; its mark is made likely here, and what follows it is held to the tools."""
    folder = write(tmp_path / "model", with_calls, chat_template=TEMPLATE)
    options = {"tools": TOOLS, "chat_template": "<tool_call>{{ messages[0].content or tools }}"}
    with opened(folder) as llm:
        (mark,) = llm.tokenizer.encode("<tool_call>", special=False)
        params = SamplingParams(max_tokens=400, temperature=0, logit_bias={mark: 100}, ignore_eos=True)
        result = llm.chat(HELLO, params, **options)
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in result.tool_calls[:-1]]
    assert calls and all(call in [("list", {"of": "x"}), ("sum", {"a": 1}), ("sum", {"a": 2})] for call in calls)

    async def run():
        async with AsyncLLM(folder, device="cpu", dtype="float32") as client:
            return [piece async for piece in client.chat(HELLO, params, **options)]

    found = join_calls(c for piece in asyncio.run(run()) for c in piece.tool_calls)
    assert [c["function"] for c in found] == [c["function"] for c in result.tool_calls]


def test_a_rule_that_cannot_be_enforced_is_left_out_unless_a_tool_is_strict(llm, monkeypatch):
    def refuse(params):
        raise UsageError("It is too complex.")

    monkeypatch.setattr(llm, "constraint", refuse)
    plan = llm.plan_chat(HELLO, PARAMS, tools=TOOLS)
    assert not plan.params.structural_tags and not plan.has_optional_tags
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert llm.plan_chat(HELLO, PARAMS, tools=strict).params.structural_tags


def test_a_demanded_call_excludes_another_rule_and_names_what_it_does_not_hold(llm):
    with pytest.raises(UsageError, match=r"json_schema.*tool_choice"):
        llm.chat(HELLO, SamplingParams(json_schema={}), tools=TOOLS, tool_choice="required")
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 1}}}
    function = {"type": "function", "function": {"name": "f", "parameters": unique}}
    with pytest.warns(InferplaneWarning, match="no effect on the text: uniqueItems"):
        llm.plan_chat(HELLO, PARAMS, tools=[function], tool_choice="required")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"thinking": "yes"}, "thinking = 'yes'"),
        ({"thinking_token_budget": -1}, "thinking_token_budget = -1"),
        ({"tool_choice": "required"}, "tool_choice = 'required'"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice = 'any'"),
        ({"tools": [TOOL], "tool_choice": {"name": "add"}}, r"tool_choice = \{'name': 'add'\}"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "sub"}}}, "'sub'"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "of type 'array'"),
        ({"tools": [{"name": "add"}]}, r"tools\[0\] = "),
        ({"tools": [TOOL, TOOL]}, r"tools\[1\] has the name 'add', as a tool before it"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot set messages"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs = \[1\]"),
        ({"tool": [TOOL]}, "LLM.chat takes no tool"),
        ({"max_tokens": 3}, "LLM.chat takes no max_tokens"),
        ({"chat_template": "think.jinja"}, "'think.jinja' is no Jinja template"),
        ({"chat_template": "{{ a }}\n{% for %}"}, r"does not compile \(TemplateSyntaxError: .*, line 2\)"),
        ({"chat_template": "</think>{{ messages[0].content }}", "thinking": False}, "does not read it"),
        ({"chat_template": "{{ messages[0].content }}", "thinking": True}, "not known to think"),
        ({"chat_template": "{{ messages[0].content }}", "thinking_token_budget": 3}, "not known to think"),
    ],
)
def test_options_that_cannot_be(llm, options, says):
    with pytest.raises(UsageError, match=says) as caught:
        llm.chat(HELLO, PARAMS, **options)
    assert caught.value.there_is or caught.value.remedy or "compile" in says


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sampling_params", "vLLM's sampling_params is params here"),
        ("use_tqdm", "chat show no progress"),
        ("lora_request", "merge the adapter"),
        ("add_generation_prompt", "continue_final_message here"),
        ("reasoning_effort", 'chat_template_kwargs here (of chat: {"reasoning_effort": "high"})'),
        ("response_format", "json_schema here"),
        ("enable_thinking", "thinking here"),
    ],
)
def test_options_of_other_engines_are_answered(llm, name, remedy):
    calls = {
        "LLM.chat": lambda: llm.chat(HELLO, **{name: None}),
        "AsyncLLM.chat": lambda: asyncio.run(anext(AsyncLLM.chat(None, HELLO, **{name: None}))),
    }
    for call, run in calls.items():
        with pytest.raises(UsageError, match=f"^{call} takes no {name}") as caught:
            run()
        assert remedy in caught.value.remedy and "thinking_token_budget" in caught.value.there_is


def test_parameters_for_each_conversation(llm):
    found = llm.chat([HELLO, HELLO], [replace(PARAMS, max_tokens=2), replace(PARAMS, max_tokens=4)])
    assert [len(result.token_ids) for result in found] == [2, 4] and isinstance(found[0], ChatResult)
    with pytest.raises(UsageError, match="2 sampling params for 1 conversation"):
        llm.chat(HELLO, [PARAMS, PARAMS])
    with pytest.raises(UsageError, match="params = ") as caught:
        llm.stream_chat(HELLO, [PARAMS])
    assert caught.value.there_is == "one SamplingParams"


def test_a_wrong_conversation_in_a_list_is_named(llm):
    with pytest.raises(UsageError, match=r"^Conversation 2 of 2: messages\[0\]"):
        llm.chat([HELLO, [{"role": "user", "content": 3}]], PARAMS)
    for call in (llm.stream_chat, llm.plan_chat):
        with pytest.raises(UsageError, match=r"a list of conversations \(2\)") as caught:
            call([HELLO, HELLO], PARAMS)
        assert "LLM.chat takes several" in caught.value.remedy


def test_options_without_effect_are_a_warning(llm):
    plain = "{{ messages[0].content }}"
    with pytest.warns(InferplaneWarning, match="thinking = False has no effect"):
        plan = llm.plan_chat(HELLO, PARAMS, chat_template=plain, thinking=False)
    assert plan.prompt == llm.plan_chat(HELLO, PARAMS, chat_template=plain).prompt
    with pytest.warns(InferplaneWarning, match="no effect with style: the chat template does not read it"):
        llm.plan_chat(HELLO, PARAMS, chat_template_kwargs={"style": 1, "enable_thinking": True})


def test_a_model_without_a_chat_template_is_named_as_the_user_did(tmp_path, llm, monkeypatch):
    tokenizer = Tokenizer(write(tmp_path, chat_template=None))
    tokenizer.model_name = "org/model"
    assert llm.tokenizer.model_name == llm.files.name
    monkeypatch.setattr(llm._inputs, "_tokenizer", tokenizer)
    with pytest.raises(UsageError, match=r"^org/model has no chat template") as caught:
        llm.chat(HELLO)
    assert "chat_template=" in caught.value.remedy and "--chat-template FILE" in caught.value.remedy
    assert llm.plan_chat(HELLO, chat_template="{{ messages[0].content }}").prompt


def test_async_chat_tells_parts_apart(folder, llm):
    async def go():
        async with AsyncLLM(folder, device="cpu", dtype="float32", max_num_seqs=4) as served:
            return [piece async for piece in served.chat(HELLO, PARAMS, thinking_token_budget=6, priority=1)]

    pieces, expected = asyncio.run(go()), llm.chat(HELLO, PARAMS, thinking_token_budget=6)
    assert "".join(p.reasoning for p in pieces) == expected.reasoning
    assert "".join(p.text for p in pieces) == expected.text


def test_the_command_line_thinks_as_it_is_set(llm, capsys):
    args = Namespace(max_tokens=20, seed=1, system=None)
    chat = Conversation(llm, PARAMS, args, Interrupt(patient=False))
    assert chat.set_thinking("5") == "the model thinks for at most 5 tokens"
    chat.reply("Hello", Screen())
    said = chat.messages[-1]
    assert said["reasoning_content"] and said["content"] and len(chat.messages) == 2
    out = capsys.readouterr().out
    assert said["reasoning_content"] in out and said["content"] in out and "</think>" not in out
    assert chat.set_thinking("off") == "thinking is off"
    chat.reply("x", Screen())
    assert "reasoning_content" not in chat.messages[-1]
    for words in ("", "much", "-3"):
        with pytest.raises(UsageError, match="/think needs on, off or a number of tokens"):
            chat.set_thinking(words)
    assert chat.thinking == {"thinking": False}


def test_the_command_line_says_what_thinking_does_on_each_model(llm, monkeypatch):
    chat = Conversation(llm, PARAMS, Namespace(max_tokens=20, seed=1, system=None), Interrupt(patient=False))
    use = partial(monkeypatch.setattr, llm.tokenizer, "_template")
    use(Template("{{ messages[0].content }}", {}))
    assert chat.set_thinking("off") == "this model is not known to think: there is nothing to turn off"
    for words in ("on", "7"):
        with pytest.raises(UsageError, match=f"^/think {words}: this model is not known to think"):
            chat.set_thinking(words)
    use(Template("</think>{{ messages[0].content }}", {}))
    with pytest.raises(UsageError, match="cannot turn the thought on or off") as caught:
        chat.set_thinking("off")
    assert caught.value.remedy == "/think N limits it to N tokens" and chat.thinking == {}
