"""Faults planted in the mock's kernels, one by one: conformance finds each, and the start-up canary keeps it away."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inferplane import LLM
from inferplane.binding import run_case
from inferplane.conformance.configs import TINY
from inferplane.conformance.test_ops import RUNS
from inferplane.engine import InferplaneWarning
from inferplane.ops import OPS
from tests.mock_device import kernels, mock_device
from tests.mock_device.conftest import bench_of
from tests.mock_device.hidden import DeviceTensor

pytestmark = [pytest.mark.usefixtures("mock"), pytest.mark.filterwarnings("ignore:.*run on their slow reference")]

WHOLE = {kernel.op: kernel for kernel in kernels.BLOCKS}
MODELS = {"gqa_block": TINY["llama"], "mla_block": TINY["deepseek_v3"]}


def around(after: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A fault in a kernel's result: `after(result, p, x)`."""

    def plant(function: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(p, x, batch, kv):
            return after(function(p, x, batch, kv), p, x)

        return faulty

    return plant


def raises(y, p, x):
    raise ValueError("no such tile")


def one_nan(y, p, x):
    y[-1, -1] = torch.nan
    return y


def changes_weight(y, p, x):
    p.o.weight.mul_(1.5)
    return y


def half_written(y, p, x):
    out = torch.empty_like(y)
    out[:, 1:] = y[:, 1:]
    return out


IN_RESULT = {
    "wrong values": (around(lambda y, p, x: y * 1.1), "error"),
    "wrong shape": (around(lambda y, p, x: y[:-1]), "instead of"),
    "too many results": (around(lambda y, p, x: (y, y)), "2 results instead of 1"),
    "wrong dtype": (around(lambda y, p, x: y.double()), "dtype torch.float64"),
    "no tensor": (around(lambda y, p, x: 7), "int, not a tensor"),
    "NaN": (around(one_nan), "NaN"),
    "part not written": (around(half_written), "NaN"),
    "raises": (around(raises), "no such tile"),
    "changes its input": (around(lambda y, p, x: (x.add_(1), y)[1]), "changed argument 0"),
    "changes a weight": (around(changes_weight), "changed a weight"),
    "gives back its input": (around(lambda y, p, x: x), "error"),
}
"""Fault -> how it is planted around a kernel, and a word of what is said about it."""


def past_the_end(batch):
    return (row._replace(tokens=row.tokens + 1) for row in batch.rows())


def write_everything(kv, slots, *values):
    kv.write_raw(slots.clamp_min(0), *values)


def write_one_further(kv, slots, *values):
    kv.write_raw(slots, *values)
    kv.write_raw(slots[-1:] ^ 1, *(v[-1:] for v in values))


INSIDE = {
    "ignores the causal mask": ("hidden_keys", lambda m, n: torch.zeros(m, n, dtype=torch.bool), "error"),
    "reads past the sequence": ("sequences", past_the_end, ""),
    "writes padded rows": ("remember", write_everything, "does not name"),
    "writes another slot": ("remember", write_one_further, "does not name"),
    "writes nothing": ("remember", lambda kv, slots, *values: None, "error"),
}
"""Fault -> which part of the kernel is replaced, by what, and a word of what is said about it."""


def plant(fault: str, op: str, monkeypatch: pytest.MonkeyPatch) -> tuple[kernels.Kernel, str]:
    """The mock's kernel of an op with a fault in it."""
    sound = WHOLE[op]
    if fault in INSIDE:
        part, replacement, word = INSIDE[fault]
        monkeypatch.setattr(kernels, part, replacement)
        return replace(sound), word
    wrap, word = IN_RESULT[fault]
    return replace(sound, target=wrap(sound.target)), word


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("fault", [*IN_RESULT, *INSIDE])
def test_fault_is_found(fault, op, monkeypatch):
    """By conformance's cases, in words that name it; and by the canary, which demotes the kernel and says why."""
    kernel, word = plant(fault, op, monkeypatch)
    bench = bench_of("mock:block")
    cases = [run_case(kernel, s, bench, seed=seed, padded=p) for s in OPS[op].samples() for seed, p in RUNS]
    failed = [case for case in cases if case.served and not case.passed]
    assert failed, f"conformance does not find {fault!r}"
    assert any(word in (case.detail or "error") or (word == "error" and case.error > case.tolerance) for case in failed)

    declared = [*kernels.NORMS, *(kernel if k.op == op else k for k in kernels.BLOCKS)]
    monkeypatch.setattr(mock_device.Block, "declared", declared)
    with pytest.warns(InferplaneWarning, match=f"Kernel {kernel.name} for op '{op}'") as caught:
        llm = LLM(MODELS[op], device="mock:block", dtype="float32", load_format="dummy", kv_cache_bytes=1 << 20)
    assert [w for w in caught if "gives wrong results and is not used" in str(w.message)]
    with llm:
        for site in llm.explain()["sites"]:
            if site["op"] == op:
                (loser,) = site["rejected"]
                assert loser["kernel"] == kernel.name and "demoted: canary failed on sample" in loser["reason"]
                assert site["chosen"]["kernel"] == "decomposition"
        assert torch.isfinite(llm.logits([[1, 2, 3]])[0]).all()


@pytest.mark.parametrize("op", WHOLE)
def test_sound_kernels_are_kept(op):
    """Without a fault nothing is found."""
    bench = bench_of("mock:block")
    for sample in OPS[op].samples():
        for seed, padded in RUNS:
            outcome = run_case(WHOLE[op], sample, bench, seed=seed, padded=padded)
            assert outcome.passed or not outcome.served, outcome
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gives wrong results.*")
        LLM(MODELS[op], device="mock:block", load_format="dummy", kv_cache_bytes=1 << 20).close()


def test_lengths_stay_on_the_device():
    """A kernel that does not say that it needs lengths on the host is not given them under padding."""
    seen = []

    def spy(p, x, batch, kv):
        seen.append((batch.host_lens, type(batch.query_start)))
        return kernels.gqa_block(p, x, batch, kv)

    sample = next(s for s in OPS["gqa_block"].samples() if s.step_kind == "decode")
    spying = replace(WHOLE["gqa_block"], target=spy)
    assert run_case(spying, sample, bench_of("mock:block"), padded=True).passed
    assert run_case(replace(spying, needs_host_lens=True), sample, bench_of("mock:block"), padded=True).passed
    assert seen[0] == (None, DeviceTensor)
    assert seen[-1][0].seq_lens[-2:] == (0, 0)
