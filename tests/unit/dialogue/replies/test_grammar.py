"""The grammar of calls in each form accepts what the form's goldens write, and refuses what is wrong."""

from __future__ import annotations

import json

import pytest

from inferplane.dialogue.replies.catalog import FORMS
from inferplane.dialogue.replies.grammar import make_call_grammar
from tests.unit.dialogue.replies.goldens import GOLDENS, NAMED, THOUGHT, TOOLS

llguidance = pytest.importorskip("llguidance")
TOKENIZER = llguidance.LLTokenizer("byte")
STRICT = {
    name: {**schema, "additionalProperties": False, **({"required": ["name"]} if schema["properties"] else {})}
    for name, schema in TOOLS.items()
}


def accepts(grammar: str, text: str) -> bool:
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    assert llguidance.LLMatcher.validate_grammar(lark) == "", grammar
    matcher = llguidance.LLMatcher(TOKENIZER, lark, log_level=0)
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def calls_of(golden) -> str:
    """The part of a golden's text that is calls of its form's first tool form; "" if there is none."""
    form = NAMED[golden.form].tools[0]
    text = golden.text.replace(THOUGHT, "")
    if not golden.calls or (form.trigger and form.trigger not in text):
        return ""
    text = text[text.index(form.trigger) :] if form.trigger else text
    return text.removesuffix("\n</answer>").removesuffix("\n").removesuffix("Wait.")


WRITTEN = [(golden.form, text) for golden in GOLDENS if NAMED[golden.form].tools and (text := calls_of(golden))]
OTHERS = (
    "[TOOL_CALLS] [",
    "<|python_tag|>",
    "<|python_start|>",
    "'",
    "list_alljson",
    '"type"',
    '"{',
    '{"arguments"',
    "\n{",
    "(True",
    "\\U000",
    "<think>",
    "[list",
    "```",
)
"""What is written otherwise than a form's own way, and only read."""


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, text in WRITTEN if not any(o in text for o in OTHERS)]
)
def test_goldens_are_accepted_and_wrong_calls_refused(name, text):
    form = NAMED[name].tools[0]
    grammar = make_call_grammar(form, STRICT)
    assert accepts(grammar, text), (text, grammar)
    assert not accepts(grammar, "I look. " + text)
    assert not accepts(grammar, text.replace("find_town", "find_place").replace("list_all", "list_none"))
    assert not accepts(grammar, text[: len(text) // 2])
    if "limit" in text:
        assert not accepts(grammar, text.replace("3", "three")), text
    if form.trigger and text.count(form.trigger) == 1 and form.begin:
        behind = make_call_grammar(form, STRICT, is_triggered=True)
        assert accepts(behind, text.removeprefix(form.trigger))


def test_all_forms_have_grammars():
    for form in FORMS:
        for tool_form in form.tools:
            for options in ({}, {"is_triggered": True}, {"max_calls": 1}):
                lark = llguidance.LLMatcher.grammar_from_lark(make_call_grammar(tool_form, STRICT, **options))
                assert llguidance.LLMatcher.validate_grammar(lark) == "", (form.name, options)
    assert len({name for name, text in WRITTEN if not any(o in text for o in OTHERS)}) > 15


def test_one_call_of_one_function():
    form, schema = NAMED["qwen3"].tools[0], {"list_all": STRICT["list_all"]}
    one = '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>'
    grammar = make_call_grammar(form, schema, max_calls=1)
    assert accepts(grammar, one) and not accepts(grammar, f"{one}\n{one}")
    assert not accepts(grammar, one.replace("list_all", "find_town"))


def test_special_tokens_are_written_as_tokens():
    grammar = make_call_grammar(NAMED["mistral"].tools[0], STRICT, {"[TOOL_CALLS]": 9, "[ARGS]": 32})
    assert "<[9]> call" in grammar and '"list_all" <[32]>' in grammar
    dsml = make_call_grammar(NAMED["deepseek_v32"].tools[0], STRICT, {"｜DSML｜": 7})
    assert '"<" <[7]> "function_calls>"' in dsml and '"</" <[7]> "invoke>"' in dsml
    for text in (grammar, dsml):
        assert json.dumps(STRICT["list_all"]) in text or "call_" in text


def test_options_of_schemas():
    options = {"whitespace_pattern": r"[ ]{0,1}"}
    grammar = make_call_grammar(NAMED["json"].tools[0], STRICT, json_options=options)
    text = '[{"name": "find_town", "arguments": {"name": "Ulm"}}]'
    assert accepts(grammar, text) and not accepts(grammar, text.replace('"name": "Ulm"', '"name":   "Ulm"'))
