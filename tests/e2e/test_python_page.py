"""docs/python.md: its examples run, and its tables have every name with its default."""

import dataclasses
import inspect
import re

import pytest

import inferplane
from inferplane import LLM, Delta, Result, SamplingParams, errors
from inferplane.engine.request.results import Timings, TokenLogprob
from inferplane.engine.speculate.config import SpeculativeConfig
from tests.house.rules import REPOSITORY

PAGE = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TABLES = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)


def rows(table: str) -> dict[str, list[str]]:
    """The first cell of each row -> the others."""
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]
    return {first.strip("`"): rest for first, *rest in cells}


def table_with(*names: str) -> dict[str, list[str]]:
    (found,) = [t for t in map(rows, TABLES) if set(names) <= set(t)]
    return found


def defaults(kind: type) -> dict[str, str]:
    """Argument -> its default as the page writes it."""
    out = {}
    for name, p in list(inspect.signature(kind).parameters.items()):
        factory = next(
            (f.default_factory for f in getattr(kind, "__dataclass_fields__", {}).values() if f.name == name), None
        )
        value = p.default if factory in (None, dataclasses.MISSING) else factory()
        out[name] = "" if value is inspect.Parameter.empty else f"`{value!r}`"
    return out


@pytest.mark.parametrize("i", range(len(BLOCKS)))
def test_examples_run(i, capsys):
    names = {"__name__": "__main__"}
    exec(compile(BLOCKS[i], f"docs/python.md, example {i + 1}", "exec"), names)
    if "texts" in names:
        assert len(names["texts"]) == 3 and all(names["texts"])
    elif "result" in names:
        assert len(names["result"].token_ids) == 24 or names["result"].finish_reason == "stop"
    assert capsys.readouterr().out.strip() or "texts" in names or "speculative" in names


def test_the_example_with_tools_answers_calls(monkeypatch, capsys):
    """The model's first reply is a call here; the second one is its own."""

    class Calling(LLM):
        def generate(self, prompts, params=None):
            results = super().generate(prompts, params)
            text = self.tokenizer.decode(results[0].prompt_token_ids)
            if "Rain in Oslo" in text:
                return results
            call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
            return [dataclasses.replace(results[0], text=call)]

    monkeypatch.setattr(inferplane, "LLM", Calling, raising=False)
    (block,) = [block for block in BLOCKS if "tool_calls" in block]
    names = {}
    exec(compile(block, "docs/python.md, tools", "exec"), names)
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool"]
    assert names["messages"][2]["content"] == "Rain in Oslo" and names["messages"][2]["tool_call_id"]
    assert capsys.readouterr().out == names["reply"].text + "\n" and not names["reply"].tool_calls


def test_there_are_examples_of_each_kind():
    assert len(BLOCKS) == 6
    assert all(
        any(word in b for b in BLOCKS) for word in ("LLM(", "AsyncLLM(", "speculative_config=", "InferplaneError")
    )


@pytest.mark.parametrize(
    ("kind", "some"), [(LLM, "max_num_seqs"), (SamplingParams, "top_k"), (SpeculativeConfig, "adaptive")]
)
def test_arguments_stand_with_their_defaults(kind, some):
    assert {name: cells[0] for name, cells in table_with(some).items()} == defaults(kind)


@pytest.mark.parametrize("kind", [Result, Timings, TokenLogprob])
def test_fields_are_all_there(kind):
    names = [f.name for f in dataclasses.fields(kind)]
    assert list(table_with(*names)) == names


def test_deltas_and_errors_are_all_there():
    (words,) = re.findall(r"A `Delta`, which streams yield, has (.*?): what is new", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", words) == list(Delta.__struct_fields__)
    kinds = {
        name: base
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.InferplaneError) and kind is not errors.InferplaneError
        for base in kind.__bases__
        if base is not errors.InferplaneError
    }
    assert {name: cells[0] for name, cells in table_with("UsageError").items()} == {
        name: f"`{base.__name__}`" for name, base in kinds.items()
    }
