"""The pages for those who come from other engines: commands, flags, variables and names of this side exist."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import fields

import pytest

from inferplane import LLM, AsyncLLM, ChatResult, SamplingParams
from inferplane.cli.main import SUBVERBS, VERBS, verb_parser
from inferplane.engine.request.other_engines import OTHER_OPTIONS, OTHER_VERBS, advice
from inferplane.serving.settings import FIELDS
from tests.unit.support.coming_from import PAGES, ROWS

FLAGS = {flag for verb in (*VERBS, *map(" ".join, SUBVERBS)) for flag in verb_parser(verb)[0]._option_string_actions}
COMMANDS = [(row, code) for row in ROWS for code in row.code_here if "inferplane " in code]
HUB_VARIABLES = {"HF_HOME", "HF_TOKEN"}
METHODS = re.compile(r"(llm|result)\.(\w+)")


def test_there_is_a_page_for_each_engine_whose_users_ask():
    engines = ["llama-cpp", "ollama", "paddlenlp", "vllm"]
    assert [page.stem for page in PAGES] == [f"coming-from-{engine}" for engine in engines]
    assert len(ROWS) > 80 and {row.page for row in ROWS} == {page.name for page in PAGES}


@pytest.mark.parametrize(("row", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_commands_parse(row, command):
    words = shlex.split(command.partition("inferplane ")[2])
    parts = 2 if tuple(words[:2]) in SUBVERBS else 1
    verb_parser(" ".join(words[:parts]))[0].parse_all(words[parts:])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page} {row.there}")
def test_names_of_this_side_exist(row):
    for code in row.code_here:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code):
            assert flag in FLAGS or flag == "--nproc-per-node", flag
        for variable in re.findall(r"\b(?:INFERPLANE|HF)_[A-Z_]+", code):
            assert variable in HUB_VARIABLES or variable.removeprefix("INFERPLANE_").lower() in FIELDS, variable
        for kind, name in METHODS.findall(code):
            names = {f.name for f in fields(ChatResult)} if kind == "result" else set(dir(LLM))
            assert name in names, code
        if (call := re.fullmatch(r"(SamplingParams|LLM|AsyncLLM)\((.*)\)", code)) is not None:
            takes = {"LLM": LLM, "AsyncLLM": AsyncLLM, "SamplingParams": SamplingParams}[call[1]]
            for keyword in re.findall(r"(\w+)=", call[2]):
                assert keyword in inspect.signature(takes).parameters, code


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page} {row.there}")
def test_what_other_engines_call_otherwise_is_answered(row):
    for code in row.code_there:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code):
            assert flag in FLAGS or advice(flag) or code.startswith(("ollama show", "vllm bench")), flag
        verb = re.match(r"(?:vllm|ollama) ([a-z-]+)", code)
        assert verb is None or verb[1] in VERBS or verb[1] in OTHER_VERBS, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_the_table_of_options_have_their_heading(page):
    engines = {re.sub(r"[^a-z]", "", option.engine.lower()) for option in OTHER_OPTIONS}
    (anchor,) = re.findall(r"\(other-engines\.md#(\w+)\)", page.read_text(encoding="utf-8"))
    assert anchor in engines
