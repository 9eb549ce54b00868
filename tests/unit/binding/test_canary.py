"""The start-up check: every kernel that was chosen, none that was not, and what follows when one is wrong."""

import math
import re

import pytest
import torch

from inferplane.binding import DictSource, link, load, run_canary
from inferplane.kvcache import paged_layout
from inferplane.ops import OPS, GatedMLP, KVWrite, Linear, RMSNorm
from inferplane.types import QTensor, Weight, When
from tests.unit.support.small import BF16, LAYOUT, chosen, close, kernel, lost, plan, tensors_for, tiny_llama, w

MLP = GatedMLP(Linear(Weight(("gate", "up"), (96, 64))), Linear(w("down", 64, 48)))


def body(op, *args):
    return OPS[op].__call__(*args)


def scribble(p, x):
    y = body("linear", p, x)
    x.zero_()
    return y


FAULTS = {
    "shape": (lambda p, x: body("linear", p, x)[:, 1:], r"result 0 has shape \[1, 95\] instead of \[1, 96\]"),
    "dtype": (lambda p, x: body("linear", p, x).double(), "result 0 has dtype torch.float64 instead of torch.float32"),
    "NaN": (lambda p, x: body("linear", p, x) * math.nan, "result 0 holds NaN or Inf"),
    "values": (lambda p, x: body("linear", p, x) * 1.02, "result; error 0.02, tolerance 1e-05"),
    "raising": (lambda p, x: 1 / 0, "raised ZeroDivisionError: division by zero"),
    "input": (scribble, "it changed argument 0"),
    "absent": ("no_such_runtime:linear", "raised KernelError: .*no_such_runtime"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_reported_and_demoted_on_rebind(fault):
    target, words = FAULTS[fault]
    bad, good = kernel("linear", "bad", 90, target=target), kernel("linear", "good", 10)
    p = plan(MLP, bad, good, kernel("silu_mul"))
    verdicts = {v.kernel: v for v in run_canary(p, "cpu", lambda request: [LAYOUT])}
    assert set(verdicts) == {bad, p.choices["decode"].children["act"].kernel}, "losers are not checked"
    verdict = verdicts.pop(bad)
    assert verdict.failed and [v.failed for v in verdicts.values()] == [False]
    assert verdict.reason.startswith("canary failed on sample 'm1': ")
    assert re.search(words, verdict.reason), verdict.reason

    again = plan(MLP, bad, good, kernel("silu_mul"), demoted={bad: verdict.reason})
    assert chosen(again, "down") == "good:linear" and lost(again, "down", bad.name) == f"demoted: {verdict.reason}"
    assert not any(v.failed for v in run_canary(again, "cpu", lambda request: [LAYOUT]))
    t, x = tensors_for(MLP), torch.randn(3, 64)
    f, usual = (link(q, load(q, DictSource(t)).packed)["decode"] for q in (again, plan(MLP)))
    assert close(MLP, f(x), usual(x))


def test_each_kernel_once_whatever_the_layers_and_columns():
    calls = []

    def counted(p, x):
        calls.append(x.shape)
        return body("linear", p, x)

    p = plan(tiny_llama(), kernel("linear", target=counted), kernel("attention"), kernel("kv_write"))
    verdicts = run_canary(p, "cpu", lambda request: [LAYOUT])
    assert sorted(v.kernel.op for v in verdicts) == ["attention", "kv_write", "linear"]
    assert len(calls) == 2, "one sample, called twice to see whether the first result stays"
    known = {id(v.kernel) for v in verdicts}
    assert run_canary(p, "cpu", lambda request: [LAYOUT], known) == [] and len(calls) == 2


def test_columns_with_their_own_kernels_are_both_checked():
    few, many = (kernel("linear", k, when=When(step_kinds=(k,))) for k in ("decode", "mixed"))
    verdicts = run_canary(plan(MLP, few, many), "cpu", lambda request: [LAYOUT])
    assert [(v.kernel, v.outcome.passed, v.sample) for v in verdicts] == [(few, True, "m1"), (many, True, "m1")]


def test_a_kernel_that_serves_no_sample_is_not_checked_and_says_so():
    huge = kernel("rms_norm", when=When(needs=(("a width of 7", lambda op: op.weight.shape[0] == 7),)))
    (verdict,) = run_canary(plan(RMSNorm(w("n", 7), 1e-6), huge), "cpu", lambda request: [LAYOUT])
    assert not verdict.failed and verdict.outcome is None and "accepts none of its op's samples" in verdict.reason


def test_the_first_sample_that_is_served_is_taken():
    wide = kernel("rms_norm", when=When(needs=(("a wide row", lambda op: op.weight.shape[0] > 100),)))
    (verdict,) = run_canary(plan(RMSNorm(w("n", 128), 1e-6), wide), "cpu", lambda request: [LAYOUT])
    assert (
        verdict.sample == next(s.label for s in RMSNorm.samples() if s.op.weight.shape[0] > 100) and not verdict.failed
    )


@pytest.mark.parametrize("sound", [True, False])
def test_a_kernel_is_checked_on_the_formats_it_was_chosen_for(sound):
    """A kernel that is right on plain weights may be wrong on the FP8 weights that it is there for."""
    seen = []

    def both(p, x):
        seen.append("fp8" if isinstance(p.weight, QTensor) else "plain")
        return body("linear", p, x) * (1 if sound or seen[-1] == "plain" else 1.1)

    takes = kernel("linear", target=both, when=When(formats=("plain", "fp8_block")))
    model = tiny_llama(format="fp8_block")
    (verdict,) = [v for v in run_canary(plan(model, takes), "cpu", lambda request: [LAYOUT])]
    assert set(seen) == {"fp8"} and verdict.sample == "fp8_block" and verdict.failed is not sound
    seen.clear()
    mixed = GatedMLP(Linear(w("g", 96, 64, format="fp8_block")), Linear(w("d", 64, 48)))
    (verdict,) = run_canary(plan(mixed, takes), "cpu", lambda request: [LAYOUT])
    assert verdict.failed is not sound and set(seen) == ({"fp8", "plain"} if sound else {"fp8"})


def test_the_plans_own_layout_and_dtype_are_used():
    seen = []

    def write(p, k, v, batch, kv):
        seen.append((kv.layout, k.dtype))
        kv.write(batch.slots, k, v)

    offers = [paged_layout(16), paged_layout(48, "int8"), paged_layout(64)]
    k = kernel("kv_write", target=write, when=When(kv_layouts=("paged_48_int8",)))
    p = plan(tiny_llama(), k, offers=offers, dtype=BF16)
    (verdict,) = run_canary(p, "cpu", lambda request: offers)
    assert not verdict.failed and set(seen) == {("paged_48_int8", BF16)}


def test_faults_that_only_padding_shows():
    def careless(p, k, v, batch, kv):
        kv.write(batch.slots.abs(), k, v)  # slot -1 becomes slot 1

    p = plan(KVWrite.samples()[0].op, kernel("kv_write", target=careless))
    (verdict,) = run_canary(p, "cpu", lambda request: [LAYOUT])
    assert verdict.failed and "it wrote slot 1" in verdict.reason


def test_nothing_chosen_nothing_checked():
    assert run_canary(plan(MLP), "cpu", lambda request: [LAYOUT]) == []
