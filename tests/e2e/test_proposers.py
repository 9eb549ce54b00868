"""The conformance of proposers: core's pass it, the example passes it, and each fault is found by a case of its own."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from inferplane import LLM, SamplingParams, plugins
from inferplane.cli.main import WRONG_USAGE, main
from inferplane.conformance import proposers
from inferplane.conformance.proposers import CASES, check_proposer
from tests.house.rules import IN_TREE

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "inferplane-bigrams"
LINES = 36
FAULTS = {
    "too many": ("len(drafts) < most", "len(drafts) <= most", {*CASES}, "drafts for a sequence that may have"),
    "no token": ("drafts.append(last)", "drafts.append(last + 24)", {*CASES}, "which is no token"),
    "keeps ids": ("self.known.pop(request.request_id, None)", "pass", {"forget"}, "known still has an ended request"),
    "keeps requests": (
        "self.known.pop(request.request_id, None)",
        "self.known[0] = request",
        {"forget"},
        "ended request.s. are held",
    ),
    "writes into a request": (
        "drafts, last = [], text[-1]",
        "drafts, last = [], text[-1]\n        request.generated[-1] = 3",
        {"greedy tokens", "sampled tokens"},
        "",
    ),
}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """`(old, new) -> None`: makes the example the one plugin beside the in-tree ones, with a part replaced."""

    def install(old="", new=""):
        source = (EXAMPLE / "inferplane_bigrams.py").read_text()
        assert old in source
        (tmp_path / "inferplane_bigrams.py").write_text(source.replace(old, new) if old else source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "inferplane_bigrams", raising=False)
        found = plugins.discover(f"{IN_TREE},inferplane_bigrams")
        assert not found.list_quarantined()
        monkeypatch.setattr("inferplane.plugins.host", lambda: found)

    return install


def test_the_example_is_short():
    text = (EXAMPLE / "inferplane_bigrams.py").read_text()
    assert sum(1 for line in text.splitlines() if line.strip()) < LINES


@pytest.mark.parametrize("method", ["ngram", "suffix", "bigrams"])
def test_sound_proposers_pass(method, example):
    example()
    cases = check_proposer(method, device="cpu")
    assert [case.name for case in cases] == [*CASES]
    assert not [case for case in cases if case.failure]
    made, stood = (int(words.split()[0]) for words in cases[0].counts.split(", "))
    assert 0 < stood < made


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault, example):
    old, new, where, words = FAULTS[fault]
    example(old, new)
    found = {case.name: case.failure for case in check_proposer("bigrams", device="cpu") if case.failure}
    assert where <= {*found} and (where == {*CASES} or {*found} == where)
    for name in where:
        assert re.search(words, found[name])


def test_a_verification_that_changes_the_distribution_is_found():
    found = {case.name for case in check_proposer("ngram", {"accept_policy": "accept_all"}, "cpu") if case.failure}
    assert found == {"greedy tokens", "sampled tokens"}


def test_chi_square():
    same = Counter({i: 100 for i in range(10)})
    assert proposers.chi_square(same, same) < 0
    assert proposers.chi_square(same, Counter({**same, 0: 40, 1: 160})) > proposers.MAX_DEVIATIONS
    rare = Counter({i: 1 for i in range(100)})
    assert proposers.chi_square(rare, Counter({i + 100: 1 for i in range(100)})) < 1, "rare tokens are one class"


def test_the_verb(example, tmp_path, monkeypatch, capfd):
    def run(*words):
        code = main(["conform", "--proposer", *words])
        return code, capfd.readouterr()

    monkeypatch.setenv("INFERPLANE_PLUGINS", "inferplane_bigrams")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    example()
    code, said = run("bigrams", "--option", "min-text=4", "--device", "cpu")
    assert code == 0 and [line.split()[0] for line in said.out.splitlines()] == ["ok"] * len(CASES)
    example("len(drafts) < most", "len(drafts) <= most")
    code, said = run("bigrams", "--device", "cpu")
    assert code == 1 and "FAIL greedy tokens" in said.out
    for words, said in ((["--option", "min-text"], "NAME=VALUE"), (["--option", "wide=3"], "'wide'"), (["-x"], "'-x'")):
        code, printed = run("bigrams", *words)
        assert code == WRONG_USAGE and said in printed.err
    code, printed = run("mtp")
    assert code == WRONG_USAGE and "'mtp' is no proposer without a network" in printed.err


def test_the_demo_model_with_the_example(example):
    """The same text as without drafts, in fewer steps."""
    example()
    params, prompt = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True), "a = [1, 2, 3, 1, 2, 3, 1, 2, 3,"
    with LLM("demo", device="cpu", dtype="float32", deterministic=True) as llm:
        (plain,) = llm.generate(prompt, params)
        before = llm.engine.stats()["steps_total"]
        llm.set_speculation({"method": "bigrams", "num_speculative_tokens": 4, "min_text": 4})
        (drafted,) = llm.generate(prompt, params)
        assert drafted.token_ids == plain.token_ids
        assert llm.engine.stats()["steps_total"] - before < before
