"""Forms by name, by template and by family."""

from __future__ import annotations

import pytest

from inferplane.dialogue.replies import tables
from inferplane.dialogue.replies.catalog import FORMS, choose_form, find_form, list_names
from inferplane.dialogue.replies.forms import ReasoningForm, ReplyForm, ToolForm
from inferplane.errors import UsageError
from tests.unit.dialogue.replies.goldens import NAMED


def test_names_are_unique():
    names = [name for form in FORMS for name in (form.name, *form.other_names)]
    assert sorted(names) == list_names() and len(set(names)) == len(names)
    types = [kind for form in FORMS for kind in form.model_types]
    assert len(set(types)) == len(types)


@pytest.mark.parametrize(
    ("source", "model_type", "reasoning", "tools"),
    [
        (None, "", None, "json"),
        ("{{ messages }}", "", None, "json"),
        (None, "gpt_oss", tables.HARMONY_ANALYSIS, "openai"),
        ("{{ messages }}", "deepseek_v3", None, "deepseek_v3"),  # its template knows of no thought
        ("{{ m.content.split('</think>')[-1] }}", "llama", tables.THINK, "json"),
        ("<tool_call> </think>", "qwen3", tables.THINK, "qwen3"),
        ("<tool_call>", "qwen2", None, "qwen3"),
        ("<tool_call> <function= </think>", "", tables.THINK, "qwen3_coder"),
        ("[TOOL_CALLS] <think> </think>", "mistral", tables.THINK, "mistral_list"),
        ("<tool_call> <think> </think> <response>", "", tables.THINK_RESPONSE, "qwen3"),
        ("<tool_calls> 助手： </think>", "hunyuan_v1_moe", tables.THINK_ANSWER, "hunyuan_a13b"),
        ("<tool_calls> </think>", "hunyuan_v1_dense", tables.THINK_ANSWER, "jamba"),
        ("{{ messages }}", "kimi_k2", None, "kimi_k2"),  # the first template of Kimi K2 shows no calls
        ("with <tool_calls></tool_calls>: <tool_calls>", "", None, "minimax"),
        ("<|tool_call|> Here is my thought process:", "granite", tables.THOUGHT_PROCESS, "granite"),
    ],
)
def test_the_form_of_a_model(source, model_type, reasoning, tools):
    found = find_form(source, model_type)
    assert found.reasoning == reasoning
    assert found.tools == NAMED[tools].tools


def test_a_plugin_s_form_counts_before_those_in_tree():
    own = ReplyForm("own", tools=(ToolForm("json", begin="<tool_call>", template_marks=("<tool_call>",)),))
    assert find_form("<tool_call>", forms=(own, *FORMS)).tools == own.tools
    assert find_form("<tool_call> <function=", forms=(own, *FORMS)).tools == NAMED["qwen3_coder"].tools


def test_the_user_s_choice():
    own = find_form("<tool_call> </think>")
    assert choose_form(own) is own
    assert choose_form(own, tools="none").tools == () and choose_form(own, tools="none").reasoning is tables.THINK
    assert choose_form(own, "none").reasoning is None and choose_form(own, "none").tools == own.tools
    assert choose_form(own, "granite", "hermes").name == "granite+qwen3"
    assert choose_form(own, "deepseek_r1", "deepseek_v3") is NAMED["deepseek_v3"]
    assert choose_form(own, "none", "none").name == "none"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"tools": "hermess"}, ["tool calls named 'hermess'", "kimi_k2", "write 'hermes'"]),
        ({"reasoning": "hermes_json"}, ["thoughts named 'hermes_json'", "deepseek_r1", "'auto' or 'none'"]),
        ({"tools": "exaone_deep"}, ["tool calls named 'exaone_deep'"]),
    ],
)
def test_unknown_names_are_refused(chosen, words):
    with pytest.raises(UsageError) as refused:
        choose_form(FORMS[-1], **chosen)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ToolForm("named_json"), "headers"),
        (lambda: ToolForm("parameters", call_begin="<a>", call_end="</a>"), "key_begin, key_end_marks, value_end"),
        (lambda: ReasoningForm("", "</a>"), "begin and end"),
    ],
)
def test_forms_without_their_marks_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_marks_stay_visible():
    assert NAMED["kimi_k2"].visible_tokens[:3] == ("<think>", "</think>", "<|tool_calls_section_begin|>")
    assert {"<|call|>", "<|return|>", "<|channel|>"} <= set(NAMED["openai"].visible_tokens)
    assert "[ARGS]" in NAMED["mistral"].visible_tokens


def test_fenced_calls_are_those_of_models_that_write_json():
    fenced = [form.name for form in FORMS if tables.FENCED_CALLS in form.tools]
    assert {"json", "qwen3", "llama3_json"} <= set(fenced) and not {"glm45", "deepseek_v3", "openai"} & set(fenced)
    for form in FORMS:
        assert form.uses_channels or not form.tools or tables.JSON_CALLS in form.tools
