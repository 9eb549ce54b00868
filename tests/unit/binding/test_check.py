"""The judge of kernels: right ones pass in every dtype and KV dtype, each way of being wrong is found and named."""

import math
import re

import pytest
import torch

from inferplane.binding import Bench, run_case
from inferplane.kernels.composed import composed_kernels
from inferplane.kvcache import paged_layout
from inferplane.ops import OPS, Attention, DecoderLayer, GQABlock, KVWrite, Linear, MLABlock, RMSNorm
from inferplane.ops.attention import mask_pairs
from inferplane.ops.oracle import OracleKV
from inferplane.types import Features, Packing, When
from tests.unit.support.small import BF16, DTYPES, F32, kernel

IN_TREE = [op for op in list(OPS.values()) if op.__module__.startswith("inferplane.")]
CACHED = [op for op in IN_TREE if op.samples() and op.samples()[0].op.kv_requests()]


def bench(dtype=F32, kv_dtype="auto", size=16, **options):
    return Bench("toy", "cpu", dtype, Features(), lambda request: [paged_layout(size, kv_dtype)], **options)


def cases(ops):
    return [pytest.param(op, s, id=f"{op.name}-{s.label}") for op in ops for s in op.samples()]


def judges(op):
    return [None, *(k for k in composed_kernels() if k.op == op.name)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "sample"), cases(IN_TREE))
def test_bodies_and_composed_kernels_pass(op, sample, dtype):
    outcomes = [run_case(k, sample, bench(dtype), seed=3, padded=True) for k in judges(op)]
    assert outcomes[0].passed and all(o.passed or not o.served for o in outcomes), outcomes


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize(("op", "sample"), cases(CACHED))
def test_they_pass_over_quantized_caches(op, sample, kv_dtype):
    """A block attends to what the storage made of its own K and V, and so does the oracle."""
    for dtype in (F32, BF16):
        outcomes = [run_case(k, sample, bench(dtype, kv_dtype, size=48), seed=3) for k in judges(op)]
        assert outcomes[0].passed and all(o.passed or not o.served for o in outcomes), outcomes


@pytest.mark.parametrize("sample", DecoderLayer.samples(), ids=lambda s: s.label)
def test_no_seed_sends_a_token_to_another_expert(sample):
    """A choice that rounding can turn over is in no sample: no tolerance could cover it."""
    outcomes = [
        run_case(None, sample, bench(BF16, kv_dtype), seed=seed) for seed in range(8) for kv_dtype in ("auto", "fp8")
    ]
    assert all(o.error < o.tolerance for o in outcomes), outcomes


NORM, LINEAR = RMSNorm.samples()[0], Linear.samples()[1]


def norm(p, x):
    return RMSNorm.__call__(p, x)


def wrong(name):
    """Kernels of rms_norm, each wrong in one way."""

    def lazy(p, x):
        y = torch.empty_like(x)
        y[:-1] = norm(p, x)[:-1]
        return y

    def stained(p, x):
        y = norm(p, x)
        y[0, 0] = math.nan
        return y

    def scribbles(p, x):
        y = norm(p, x)
        x[0] = 0
        return y

    def wears_out(p, x):
        y = norm(p, x)
        p.weight.mul_(2)
        return y

    return {
        "shape": lambda p, x: norm(p, x)[:, :-1],
        "one row less": lambda p, x: norm(p, x)[:-1],
        "dtype": lambda p, x: norm(p, x).double(),
        "nan": stained,
        "inf": lambda p, x: norm(p, x) / 0,
        "unwritten": lazy,
        "values": lambda p, x: norm(p, x) * 1.01,
        "rows swapped": lambda p, x: norm(p, x).flip(0),
        "nothing": lambda p, x: None,
        "a list": lambda p, x: [norm(p, x)],
        "two": lambda p, x: (norm(p, x), x),
        "raises": lambda p, x: p.no_such_weight,
        "changes its input": scribbles,
        "changes its weight": wears_out,
    }[name]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("shape", "result 0 has shape [3, 63] instead of [3, 64]"),
        ("one row less", "result 0 has shape [2, 64] instead of [3, 64]"),
        ("dtype", "result 0 has dtype torch.float64 instead of torch.float32"),
        ("nan", "result 0 holds NaN or Inf"),
        ("inf", "result 0 holds NaN or Inf"),
        ("unwritten", "result 0 holds NaN or Inf"),
        ("values", ""),
        ("rows swapped", ""),
        ("nothing", "result 0 is NoneType, not a tensor"),
        ("a list", "result 0 is list, not a tensor"),
        ("two", "2 results instead of 1"),
        ("raises", "raised AttributeError: 'View' object has no attribute 'no_such_weight'"),
        ("changes its input", "it changed argument 0"),
        ("changes its weight", "it changed a weight"),
    ],
)
def test_a_fault_is_found_and_named(fault, words):
    o = run_case(kernel("rms_norm", target=wrong(fault)), NORM, bench())
    assert o.served and not o.passed and o.error > o.tolerance == RMSNorm.tolerance[F32]
    place = r" at \S+test_check\.py:\d+" if fault == "raises" else ""
    assert re.fullmatch(re.escape(words) + place, o.detail) and "[3, 64] float32" in o.arguments
    assert ("no_such_weight" in o.traceback) == (fault == "raises")


def test_errors_are_measured_against_the_largest_value():
    o = run_case(kernel("rms_norm", target=wrong("values")), NORM, bench())
    assert o.error == pytest.approx(0.01, rel=1e-3)


def test_a_result_where_none_is_promised():
    o = run_case(
        kernel("kv_write", target=lambda p, k, v, batch, kv: kv.write(batch.slots, k, v) or k),
        KVWrite.samples()[0],
        bench(),
    )
    assert o.detail == "returned Tensor instead of nothing"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda p, k, v, batch, kv: kv.write(batch.slots, k, v * 1.5), "in the cache"),
        (lambda p, k, v, batch, kv: kv.write(batch.slots, v, k), "in the cache"),
        (lambda p, k, v, batch, kv: kv.write(batch.slots[:-1], k[:-1], v[:-1]), "in the cache"),
        (lambda p, k, v, batch, kv: None, "in the cache"),
        (lambda p, k, v, batch, kv: kv.write(batch.slots + 1, k, v), "which the step does not name"),
        (lambda p, k, v, batch, kv: kv.write(batch.slots, k * math.nan, v), "in the cache"),
        (lambda p, k, v, batch, kv: kv.write(batch.slots.add_(16).sub(16), k, v), "it changed the batch's slots"),
    ],
)
@pytest.mark.parametrize("sample", KVWrite.samples(), ids=lambda s: s.label)
def test_faults_in_the_cache_are_found(target, words, sample):
    o = run_case(kernel("kv_write", target=target), sample, bench())
    assert not o.passed and words in o.detail


def test_attention_may_not_write():
    def greedy(p, q, batch, kv):
        kv.write(batch.slots, *(torch.ones(batch.tokens, 2, 64) for _ in range(2)))
        return Attention.__call__(p, q, batch, kv)

    assert (
        "which the step does not name"
        in run_case(kernel("attention", target=greedy), Attention.samples()[0], bench()).detail
    )


def attend(fault):
    """Attention with a fault, or "" for none; it knows neither sinks, soft caps nor chunks."""

    def compute(p, q, batch, kv):
        out, window = torch.zeros(q.shape[0], p.heads, p.kv.v_dim), p.kv.window
        for a, b, n, table in batch.rows():
            k, v = (t.repeat_interleave(p.heads // p.kv.heads, 1) for t in kv.read(table, n))
            s = torch.einsum("qhd,khd->hqk", q[a:b], k) * (p.scale * (1.1 if fault == "other scale" else 1))
            hidden = mask_pairs(b - a, n, None if fault == "forgets the window" else window, q.device)
            if fault == "sees one too many":
                hidden = mask_pairs(b - a, n, None if window is None else window + 1, q.device).roll(1, 1) & hidden
            if fault == "sees one too few":
                hidden = hidden | (torch.arange(n)[None] == 0) & ~(torch.arange(n - b + a, n)[:, None] == 0)
            out[a:b] = torch.einsum("hqk,khd->qhd", s.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return out

    return compute


PLAIN_ATTENTION = [sample for sample in Attention.samples() if not sample.op.extensions()]


@pytest.mark.parametrize("sample", PLAIN_ATTENTION, ids=lambda s: s.label)
@pytest.mark.parametrize("fault", ["sees one too many", "sees one too few", "forgets the window", "other scale"])
def test_faults_in_attention_are_found(fault, sample):
    o = run_case(kernel("attention", target=attend(fault)), sample, bench())
    blind = {  # what a sample cannot show
        "sees one too many": sample.label in ("first_token", "decode", "decode_d128_mqa", "window_decode"),
        "sees one too few": sample.label.startswith("window_decode") or sample.label == "first_token",
        "forgets the window": "window" not in sample.label,
        "other scale": sample.label == "first_token",
    }[fault]
    assert o.served and (blind or not o.passed), o


@pytest.mark.parametrize("sample", Attention.samples(), ids=lambda s: s.label)
def test_attention_that_forgets_an_extension_is_found(sample):
    """A kernel that does not list sinks, caps and chunks is refused; one that lists them and forgets them is wrong."""
    refused = run_case(kernel("attention", target=attend("")), sample, bench())
    claims = When(extensions=("attention.sinks", "attention.softcap", "attention.chunk"))
    wrong = run_case(kernel("attention", target=attend(""), when=claims), sample, bench())
    if sample.op.extensions():
        assert not refused.served and wrong.served and not wrong.passed
    else:
        assert refused.served and wrong.served


def test_padding_is_ignored_by_right_kernels_and_shows_wrong_ones():
    sample = KVWrite.samples()[0]
    assert sample.label == "decode" and run_case(kernel("kv_write"), sample, bench(), padded=True).passed
    careless = kernel("kv_write", target=lambda p, k, v, batch, kv: kv.write(batch.slots.clamp_min(0), k, v))
    assert run_case(careless, sample, bench()).passed
    o = run_case(careless, sample, bench(), padded=True)
    assert not o.passed and "it wrote slot 0" in o.detail


def test_padding_hides_lengths_unless_they_are_asked_for():
    def peeks(p, q, batch, kv):
        assert batch.host_lens is not None, "lengths are not known here"
        return Attention.__call__(p, q, batch, kv)

    sample = Attention.samples()[0]
    assert "lengths are not known" in run_case(kernel("attention", target=peeks), sample, bench(), padded=True).detail
    assert run_case(kernel("attention", target=peeks, needs_host_lens=True), sample, bench(), padded=True).passed


# -- what a case is run with


def test_a_refused_sample_is_not_served():
    o = run_case(kernel("rms_norm", when=When(dtypes=(BF16,))), NORM, bench())
    assert not o.served and not o.passed and "dtype float32" in o.detail
    decode = next(s for s in Attention.samples() if s.step_kind == "decode")
    o = run_case(kernel("attention", when=When(step_kinds=("mixed",))), decode, bench())
    assert not o.served and "step kind decode" in o.detail
    o = run_case(kernel("attention", when=When(kv_layouts=("other",))), Attention.samples()[0], bench())
    assert not o.served and "no available KV layout for gqa" in o.detail


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_without_a_cache_a_sample_stands_for_steps_of_every_kind(kind):
    only = When(step_kinds=(kind,), extensions=("rms_norm.offset", "rms_norm.factor"))
    assert all(run_case(kernel("rms_norm", when=only), s, bench()).passed for s in RMSNorm.samples())


def test_the_layout_is_one_that_the_kernel_takes():
    seen = []

    def attend(p, q, batch, kv):
        seen.append(kv.layout)
        return Attention.__call__(p, q, batch, kv)

    offers = [paged_layout(16), paged_layout(48), paged_layout(64)]
    b = Bench("toy", "cpu", F32, Features(), lambda request: offers)
    k = kernel("attention", target=attend, when=When(kv_layouts=("paged_64", "paged_48")))
    assert run_case(k, Attention.samples()[0], b).passed and set(seen) == {"paged_48"}
    seen.clear()
    pinned = Bench("toy", "cpu", F32, Features(), lambda request: offers, layout="paged_64")
    assert run_case(k, Attention.samples()[0], pinned).passed and set(seen) == {"paged_64"}


def test_prepare_sees_the_layout_of_the_case():
    def prepare(op, ctx):
        return ctx.layouts[op.kv].name

    def attend(p, q, batch, kv):
        assert p.prepared == kv.layout
        return Attention.__call__(p, q, batch, kv)

    assert run_case(kernel("attention", target=attend, prepare=prepare), Attention.samples()[0], bench()).passed


def test_weights_come_in_the_kernels_packing():
    def transposed(p, x):
        return x @ p.weight + p.bias

    t = Packing("v.t", lambda w: w.t().contiguous())
    assert run_case(kernel("linear", target=transposed, packs={"weight": t}), LINEAR, bench()).passed
    upside_down = Packing("v.flip", lambda w: w.flip(0).t())
    assert not run_case(kernel("linear", target=transposed, packs={"weight": upside_down}), LINEAR, bench()).passed


def test_quantized_weights_are_judged_by_their_own_values():
    sample = next(s for s in Linear.samples() if s.label == "int4_group")
    takes = When(formats=("int4_group",))
    assert run_case(kernel("linear", when=takes), sample, bench()).passed

    def forgets_groups(p, x):
        return x @ (p.weight.data.float() * p.weight.scale[:, :1]).T

    assert not run_case(kernel("linear", when=takes, target=forgets_groups), sample, bench()).passed


class Exact:
    """A cache that stores what it is given, but gives back what was written in full."""

    def __init__(self, kv):
        self.kv, self.block_tokens, self.values = kv, kv.block_tokens, {}

    def write(self, slots, *values):
        self.kv.write(slots, *values)
        self.values.update((s, tuple(v[i] for v in values)) for i, s in enumerate(slots.tolist()))

    def read(self, table, n):
        size = self.kv.block_tokens
        slots = [int(table[t // size]) * size + t % size for t in range(n)]
        return tuple(torch.stack(x) for x in zip(*(self.values[s] for s in slots)))


@pytest.mark.parametrize("op", [GQABlock, MLABlock], ids=lambda op: op.name)
def test_a_block_that_attends_to_what_it_did_not_store_shows(op, monkeypatch):
    """Results may not depend on how a prompt was cut: K and V are always read back through the cache."""
    sample = next(s for s in op.samples() if s.label == "prefill")
    body = op.__call__
    assert run_case(None, sample, bench(F32, "int8")).passed

    def shortcut(self, x, batch, kv):
        return body(self, x, batch, kv if isinstance(kv, OracleKV) else Exact(kv))

    monkeypatch.setattr(op, "__call__", shortcut)
    outcome = run_case(None, sample, bench(F32, "int8"))
    assert not outcome.passed and not outcome.fatal and outcome.detail != "in the cache", outcome


def test_seeds_give_fresh_numbers():
    seen = []

    def keep(p, x):
        seen.append((x.clone(), p.weight.clone()))
        return norm(p, x)

    for seed in (0, 0, 1):
        run_case(kernel("rms_norm", target=keep), NORM, bench(), seed=seed)
    for a, b, c in zip(*seen[::2]):  # a case calls a kernel a second time, with the same weights
        assert torch.equal(a, b) and not torch.equal(a, c)
