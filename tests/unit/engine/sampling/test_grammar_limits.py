"""What one constraint may cost, and that its memory goes with its sequence.

The class of advisory: short expressions that fill memory, or stay in an unbounded cache (XGrammar's CVE-2025-32381).
"""

import gc
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from inferplane.confined import MEASURES
from inferplane.engine.request.params import BEYOND_LIMITS, SamplingParams
from inferplane.engine.sampling import grammar_check
from inferplane.errors import UsageError
from inferplane.serving.errors import TOO_COMPLEX, from_engine
from tests.unit.support.constrained import END, grammars

pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")
GROWING = [
    {"regex": "(.*a.{30}){30}"},
    {"regex": r".*a[^b]{300}"},
    {"regex": r"(.*[\w]{50}x){3}.*\pL{80}y"},
    {"regex": "((a{1,50}){1,50}){1,50}"},
    {"grammar": "start: (A|B|C)*\nA: /.*a.{20}/\nB: /.*b.{20}/\nC: /[a-z]{1,500}/"},
    {"json_schema": {"type": "string", "pattern": "^.*a.{30}b.{200}$"}},
]


@pytest.fixture(scope="module")
def compiled():
    made = grammars()
    yield made
    made.close()


def allocated():
    gc.collect()
    return grammar_check._count_allocated() / 2**20


def walk(constraint, steps, seed=0):
    """Write random allowed tokens; returns the error that ended the text early, or None."""
    draw = random.Random(seed)
    try:
        for _ in range(steps):
            bits = np.unpackbits(constraint.masks()[0].view(np.uint8), bitorder="little")
            bits[END] = 0
            may = np.flatnonzero(bits)
            if not len(may):
                return None
            constraint.accept([int(draw.choice(may))])
    except UsageError as error:
        return error
    return None


@pytest.mark.parametrize("constraint", GROWING, ids=lambda c: json.dumps(c)[:40])
def test_what_a_sequence_made_a_constraint_grow_goes_with_it(compiled, constraint):
    if not allocated():
        pytest.skip("not run: the C library does not tell what is allocated")
    compiled.start(SamplingParams(**constraint))
    before = allocated()
    for seed in range(3):
        made = compiled.start(SamplingParams(**constraint))
        walk(made, 400, seed)
        assert allocated() - before < 96, "of one sequence, while it lives"
        del made
    assert allocated() - before < 1


@pytest.mark.parametrize("constraint", GROWING[:3], ids=lambda c: json.dumps(c)[:40])
def test_what_one_sequence_uses_up_is_not_taken_from_another(compiled, monkeypatch, constraint):
    monkeypatch.setattr(compiled, "_limits", compiled._llguidance.LLParserLimits(max_lexer_states=2000))
    greedy, other = (compiled.start(SamplingParams(**constraint)) for _ in range(2))
    error = walk(greedy, 2000)
    assert error is not None and BEYOND_LIMITS in str(error)
    other.accept([int(np.flatnonzero(np.unpackbits(other.masks()[0].view(np.uint8), bitorder="little"))[0])])
    assert other.masks()[0].any() and compiled.start(SamplingParams(**constraint)).masks()[0].any()


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "|".join(f"word{i}x" for i in range(400))},
        {"regex": r"(\w{1,60}\s){1,60}"},
        {"regex": "(.|\\n){1,4000}"},
        {"json_schema": {"enum": [f"v{i}" for i in range(5000)]}},
        {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 4000}, "maxItems": 1000}},
        {"grammar": 'start: e\ne: e "+" e | "(" e ")" | /[0-9]+/'},
    ],
    ids=lambda c: json.dumps(c)[:40],
)
def test_what_users_ask_for_is_within_the_limits(compiled, constraint):
    assert walk(compiled.start(SamplingParams(**constraint)), 300) is None


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "((a{0,400}){0,400}b?){0,400}" * 40},
        {"regex": r"(\pL{1,1000}\s?){1,1000}" * 30},
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: " + f"a{i + 1} " * 60 for i in range(150)) + "\na150: /x/"},
        {"json_schema": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(20)]}},
        {"json_schema": {"type": "array", "items": {"enum": [f"v{i}" for i in range(5000)]}, "maxItems": 10**9}},
    ],
    ids=lambda c: json.dumps(c)[:40],
)
def test_extreme_constraints_are_served_or_refused_by_name(compiled, constraint):
    error = None
    try:
        walk(compiled.start(SamplingParams(**constraint)), 20)
    except UsageError as refusal:
        error = refusal
    answer = from_engine(error, {}, constraint) if error is not None else None
    expected = (400, TOO_COMPLEX, next(iter(constraint)))
    assert answer is None or (answer.status, answer.code, answer.param) == expected, error


def test_memory_of_many_different_constraints_is_given_back(compiled):
    page = os.sysconf("SC_PAGE_SIZE") if Path("/proc/self/statm").exists() else pytest.skip("not run: no /proc here")

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20

    walk(compiled.start(SamplingParams(regex=".*a.{300}")), 60)
    before = resident()
    for i in range(200):
        walk(compiled.start(SamplingParams(regex=f"(.*a.{{{30 + i % 50}}}){{{10 + i}}}")), 60, seed=i)
    assert resident() - before < 150


@pytest.mark.parametrize("most", [0, 1 << 10])
def test_a_constraint_that_compiles_to_too_much_memory_is_refused(monkeypatch, tmp_path, most):
    source = Path(grammar_check.__file__).read_text()
    changed = tmp_path / "grammar_check.py"
    changed.write_text(source.replace("MAX_COMPILED_BYTES = 32 * 2**20", f"MAX_COMPILED_BYTES = {most}"))
    monkeypatch.setattr("inferplane.engine.sampling.grammar_sandbox.Path.with_name", lambda *_: changed)
    small = grammars()
    with pytest.raises(UsageError, match="too complex: it takes"):
        small.start(SamplingParams(json_schema={"enum": [f"v{i}" for i in range(5000)]}))
    small.close()


def test_constraints_are_tried_out_in_a_confined_process(monkeypatch):
    """Kind of advisory: a request's grammar runs code in the process that compiles it."""
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    tried = grammars()
    tried.start(SamplingParams(regex="a+"))
    process = tried._sandbox._process
    assert {"rlimits", "parent"} <= set(process.measures) <= set(MEASURES)
    if Path("/proc/self/environ").exists():
        assert b"s3cret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    tried.close()
    assert not process.alive
