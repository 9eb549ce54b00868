"""`tools/rename.py` carries work of 0.1 over to the names of 0.2: a plugin, a kernel, a use of the engine."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import warnings

import pytest

from tests.house.rules import REPOSITORY

TOOL = REPOSITORY / "tools" / "rename.py"
KERNELS = '''"""Kernels of acme. `codes` in a docstring is prose."""
from functools import partial

from inferplane.kernels.graphs import RecordingAccelerator
from inferplane.plugin import Features, Kernel, Kernels, KVCache, Weight

kernels = Kernels()
declare = partial(Kernel, "linear", "acme", codes="fp8")
TEXT = "codes=coarser, chain=1, wanted"  # codes, chain


@kernels("linear", "acme", rank=90, extra_error=0.1, codes="fp8")
def linear(op, x):
    codes = op.codes
    return x, codes


def chain(views, x, residual, batch, caches):
    return x, residual


@kernels("decoder_layer", "acme", chain=chain)
def layer(op, x, residual, batch, kv):
    return x, residual


def refused(kernel: Kernel, features: Features, op):
    return kernel.coarser(op) or features.lacking(wanted=["fp8"])


def weight(parts):
    made = Weight(parts, (8, 8), format="fp8_row", act="fp8_static")
    return made


class Acme(RecordingAccelerator):
    graph = None

    def build(self):
        return self.graph


class Own:
    codes, extra = "mine", 1

    def read(self):
        return self.codes, Own().extra


def cache(layers):
    return KVCache(layers, 3, 16, extra={"a": 1})
'''
ENGINE = '''"""A use of the engine."""
from inferplane import LLM, SamplingParams, SpeculativeConfig
from inferplane.kvcache import BlockAllocator


def run(text: str, max_batch: int = 3) -> str:
    config = SpeculativeConfig("ngram", speculate_max_draft_token_num=2)
    assert not config.keys_next_token
    llm = LLM("demo", max_batch=max_batch, kv_dtype="auto", speculative=config)
    return llm.generate([text], SamplingParams(max_tokens=3))[0].text


def blocks(count: int):
    allocator = BlockAllocator(8)
    taken = allocator.take(count)
    allocator.give_back(taken)
    return allocator.matched([]), taken, SamplingParams(top_k=2).cuts


def other(things, text):
    return things.take(3), text.match("x")
'''
EVIDENCE = '{"kernel": "acme:linear", "codes": "fp8", "note": "RecordingAccelerator, coarser"}\n'


def carry(tree):
    """Run the tool in a checkout; what it prints."""
    command = [sys.executable, str(tree / "tools" / "rename.py")]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """A small checkout of 0.1 after the tool, and what the tool printed."""
    tree = tmp_path_factory.mktemp("old")
    (tree / "tools").mkdir()
    for file in (TOOL, TOOL.with_name("rename_members.py")):
        (tree / "tools" / file.name).write_bytes(file.read_bytes())
    (tree / "tools" / "renames").mkdir()
    for table in TOOL.with_name("renames").glob("*.txt"):
        (tree / "tools" / "renames" / table.name).write_bytes(table.read_bytes())
    package = tree / "backends" / "acme" / "inferplane_acme"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(KERNELS)
    (package / "use.py").write_text(ENGINE)
    evidence = tree / "backends" / "acme" / "evidence"
    evidence.mkdir()
    (evidence / "l2-2025-01-01.json").write_text(EVIDENCE)
    (package / "broken.py").write_text("def f(:\n    codes\n")
    (tree / "pyproject.toml").write_text("[tool.ruff]\nline-length = 120\n")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    return tree, carry(tree)


def source(tree, name):
    return (tree / "backends" / "acme" / "inferplane_acme" / f"{name}.py").read_text()


CARRIED = {
    "kernels": [  # a plugin
        'declare = partial(Kernel, "linear", "acme", quantizes_activations_to="fp8")',
        '@kernels("linear", "acme", rank=90, extra_error=0.1, quantizes_activations_to="fp8")',
        'return kernel.is_less_precise_than(op) or features.lacking(required=["fp8"])',
        "class Acme(CapturingAccelerator):",
        "graph_class = None",
        "return self.graph_class",
        # strings, other classes and unclear receivers are left alone
        '"""Kernels of acme. `codes` in a docstring is prose."""',
        'TEXT = "codes=coarser, chain=1, wanted"  # codes, chain',
        'codes, extra = "mine", 1',
        "return self.codes, Own().extra",
        "codes = op.codes",
    ],
    "use": [  # a use of the engine
        "def run(text: str, max_batch: int = 3) -> str:",
        'config = SpeculativeConfig("ngram", num_speculative_tokens=2)',
        "assert not config.hash_covers_next_token",
        'llm = LLM("demo", max_num_seqs=max_batch, kv_cache_dtype="auto", speculative_config=config)',
        "taken = allocator.allocate(count)",
        "allocator.release(taken)",
        "return allocator.count_prefix([]), taken, SamplingParams(top_k=2).filters",
        'return things.take(3), text.match("x")',  # left alone
    ],
}
"""By file: lines that it has after the tool."""


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in CARRIED.items() for line in lines])
def test_a_file_has_the_line(carried, name, line):
    assert line in source(carried[0], name)


def test_evidence_and_what_cannot_be_parsed_are_left_alone(carried):
    tree, _ = carried
    assert (tree / "backends" / "acme" / "evidence" / "l2-2025-01-01.json").read_text() == EVIDENCE
    assert source(tree, "broken") == "def f(:\n    codes\n"


def test_what_is_gone_or_unclear_is_listed_with_its_line(carried):
    tree, printed = carried
    path = "backends/acme/inferplane_acme/kernels.py"
    lines = source(tree, "kernels").splitlines()
    at = {text: lines.index(text) + 1 for text in lines}
    for line, words in (
        (
            '@kernels("decoder_layer", "acme", chain=chain)',
            'chain of Kernel is gone: declare a kernel of "decoder_stack"',
        ),
        ('    made = Weight(parts, (8, 8), format="fp8_row", act="fp8_static")', "act of Weight is gone: pass"),
        ('    return KVCache(layers, 3, 16, extra={"a": 1})', "extra of KVCache is gone: keep it on a LayerKV"),
        ("    codes = op.codes", "codes is quantizes_activations_to now, if it is a member of Kernel"),
    ):
        assert f"{path}:{at[line]}: {words}" in printed
    assert f"{path}:{at['        return self.codes, Own().extra']}:" not in printed


def test_a_second_run_changes_nothing(carried):
    tree, _ = carried
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts}
    assert "0 files changed" in carry(tree)
    assert before == {path: path.read_bytes() for path in before}


def test_what_was_carried_over_is_imported_without_a_warning_of_old_names(carried):
    tree, _ = carried
    text = source(tree, "kernels")
    ast.parse(text)
    gone = ("chain=chain", 'act="fp8_static"', 'extra={"a": 1}')
    for name in ("kernels", "use"):
        file = tree / "backends" / "acme" / "inferplane_acme" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"carried_{name}", file)
        module = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spec.loader.exec_module(module)
        old = [str(w.message) for w in caught if "is called" in str(w.message)]
        assert all("Kernel.chain" in words for words in old), "what is gone is left to the author"
    assert all(words in text for words in gone)
    matched, taken, filters = module.blocks(2)
    assert (matched, len(taken), filters) == (0, 2, True)


def test_tables_name_what_is_there():
    """Every new name of a member stands in core, and no table has a line that is no row."""
    command = [sys.executable, "-c", "import rename; print(len([*map(list, map(rename.rows_of, rename.tables()))]))"]
    done = subprocess.run(command, cwd=TOOL.parent, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    core = "\n".join(file.read_text(encoding="utf-8") for file in (REPOSITORY / "core").rglob("*.py"))
    for line in (TOOL.with_name("renames") / "members.txt").read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        if words and words[0] in ("member", "keyword"):
            assert f"{words[2]}" in core, line
