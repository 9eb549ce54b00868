"""Hopper's kernels, their own source run on the host, against the ops' oracles. See `gluon_emulator`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.cuda.tests import gluon_emulator
from inferplane.binding import Bench, run_case
from inferplane.ops import Attention, Linear, MLAAbsorbed, MLADims, MLAExpanded, Sample, placeholder
from inferplane.plugin import HOST, Features, KVRequest
from inferplane.types.batch import Query, make_batch
from inferplane_cuda.kernels import hopper_kernels
from inferplane_cuda.kvcache import TOKEN_SCALED, layouts_for, token_scaled_layout

FEATURES = Features(["triton", "sm90a"])
PACKAGE = "inferplane_cuda.kernels.hopper"


@pytest.fixture(params=[False, True], ids=["at_once", "late"])
def launch(request, monkeypatch):
    """The module that launches, over emulated Gluon with five programs."""
    with gluon_emulator.emulated(PACKAGE, "mla_launch", "prefill_launch") as (module, prompts):
        module.prefill_launch = prompts
        monkeypatch.setattr(gluon_emulator.STATE, "late", request.param)
        monkeypatch.setattr(module, "count_programs", lambda device: 5)
        raised = lambda bits: bits.to(torch.int16).view(torch.bfloat16) * 2.0**120  # noqa: E731 - torch has no bitcast
        monkeypatch.setattr(module.mla_fp8, "raise_fp8_exponent", raised)
        monkeypatch.setattr(module.mla_fp8_mma, "exponent_of", lambda x: (x.view(torch.int32) >> 23) - 127)
        monkeypatch.setattr(
            module.mla_fp8_mma, "power_of_two", lambda n: ((n + 127) << 23).to(torch.int32).view(torch.float32)
        )
        yield module


def sample(heads: int, sequences: list[tuple[int, int]]) -> Sample:
    dims = MLADims(heads, 128, 64, 128, 512)

    def inputs(draw: Any) -> tuple[Any, ...]:
        batch, kv = draw.step(dims.request, sequences, written=True)
        wide = draw.normal(batch.tokens, heads, 192)
        return wide[..., :128], draw.normal(batch.tokens, heads, 64), batch, kv

    return Sample("made", MLAAbsorbed(placeholder(heads * 256, 512), dims, 192**-0.5, dims.request), inputs, "decode")


def prompts(op: Any, request: KVRequest, sequences: list[tuple[int, int]]) -> Sample:
    def inputs(draw: Any) -> tuple[Any, ...]:
        batch, kv = draw.step(request, sequences, written=True)
        queries = (draw.normal(batch.tokens, op.heads, 128),) if op.name == "attention" else (
            draw.normal(batch.tokens, 2, 192)[..., :128], draw.normal(batch.tokens, 2, 64)
        )  # fmt: skip
        return *queries, batch, kv

    return Sample("made", op, inputs, "mixed")


def judge(launch: Any, name: str, made: Sample, layout: str, record: Any = lambda name, value: None) -> None:
    """The worst error is within the op's tolerance and what the kernel's and the cache's number formats add."""
    worst = 0.0
    provider, function = ("gluon_fp8", f"{name}_fp8") if layout == TOKEN_SCALED else ("gluon", name)
    kernel = next(k for k in hopper_kernels() if (k.op, k.provider) == (name, provider))
    kernel = replace(kernel, target=getattr(launch if name == "mla_absorbed" else launch.prefill_launch, function))
    bench = Bench("emulated", HOST, torch.bfloat16, FEATURES, layouts_for, layout)
    for seed, padded in ((1, False), (2, True)):
        outcome = run_case(kernel, made, bench, seed=seed, padded=padded, poisoned=True)
        assert outcome.passed, f"{outcome.error} > {outcome.tolerance} {outcome.detail}\n{outcome.traceback}"
        worst = max(worst, outcome.error)
    record("op", name)
    record("kernel", kernel.name)
    record("error", worst)
    record("tolerance", outcome.tolerance)


STEPS = {
    "one": (4, [(1, 100)]),
    "first_token": (16, [(1, 0)]),
    "sixteen_heads_four_tokens": (16, [(4, 700), (1, 64), (2, 63), (3, 127)]),
    "uneven": (16, [(1, 1500), (1, 3), (1, 40), (1, 65), (1, 300), (1, 1)]),
    "odd_heads": (12, [(7, 200), (1, 90)]),
    "many_heads": (128, [(1, 130), (2, 70)]),
}


@pytest.mark.parametrize("layout", ["paged_64", "paged_64_fp8_p2", "paged_64_int8", TOKEN_SCALED])
@pytest.mark.parametrize("step", STEPS)
def test_latent_attention(launch, step, layout, record_property):
    made = sample(*STEPS[step])
    judge(launch, "mla_absorbed", made, layout, record_property)


@pytest.mark.parametrize("change", ["random", "outliers"])
def test_fp8_products_stay_near(launch, change, record_property):
    """Relative L2 error to attention in float64 over the entries as they were before they were stored in FP8."""
    g, heads, lens = torch.Generator().manual_seed(3), 16, [200, 65]
    dims, blocks = MLADims(heads, 128, 64, 128, 512), [[3, 0, 4, 1], [2, 5]]
    kv = token_scaled_layout().build(dims.request, 6, torch.bfloat16, torch.device(HOST))
    q = torch.randn(4, heads, 576, generator=g) / 24
    want = []
    for i, (n, mine) in enumerate(zip(lens, blocks, strict=True)):
        c = torch.randn(n, 576, generator=g)
        if change == "outliers":
            c[:, ::97] *= 12
        place = torch.arange(n)
        kv.write(torch.tensor(mine)[place // 64] * 64 + place % 64, c)
        for t in range(2):
            s = q[2 * i + t].double() @ c[: n - 1 + t].double().T
            want.append(s.softmax(-1) @ c[: n - 1 + t, :512].double())
    queries = [Query([0, 0], n - 2, mine) for n, mine in zip(lens, blocks, strict=True)]
    batch = make_batch(queries, block_tokens=64, device=HOST)
    got = launch.launch_mla_fp8(q.bfloat16().view(-1, 576), heads, 1.0, batch, kv).double()
    error = ((got - torch.stack(want)).norm() / torch.stack(want).norm()).item()
    record_property("op", "mla_absorbed")
    record_property("kernel", "gluon_fp8:mla_absorbed_fp8")
    record_property("error", error)
    record_property("tolerance", 0.06)
    assert error <= 0.06


def test_parts_put_together_wrongly_are_found(launch, monkeypatch):
    spaces = launch.mla.work.combine_units.function.__globals__
    combine = spaces["combine_parts"].function

    def unweighted(parts, masses, *others):
        masses.tensor.zero_()
        combine(parts, masses, *others)

    monkeypatch.setattr(spaces["combine_parts"], "function", unweighted)
    with pytest.raises(AssertionError):
        judge(launch, "mla_absorbed", sample(*STEPS["uneven"]), "paged_64")


def test_counters_are_left_at_zero(launch):
    judge(launch, "mla_absorbed", sample(*STEPS["uneven"]), "paged_64")
    space = launch.Workspace.of(torch.device(HOST))
    assert space.arrived.tolist() == [0] * 5


def test_what_others_left_in_the_cache_would_come_through(launch, monkeypatch):
    monkeypatch.setitem(launch.mla.compute_units.function.__globals__, "zero_rows_from", lambda *args: None)
    with pytest.raises(AssertionError):
        judge(launch, "mla_absorbed", sample(*STEPS["one"]), "paged_64")


def test_a_product_read_before_it_is_waited_for_is_found(launch, monkeypatch):
    early = lambda outstanding=0, deps=(): gluon_emulator.number(deps[0].acc)  # noqa: E731
    monkeypatch.setitem(launch.mla.compute_units.function.__globals__, "warpgroup_mma_wait", early)
    with pytest.raises(AssertionError):
        judge(launch, "mla_absorbed", sample(*STEPS["one"]), "paged_64")


PROMPTS = {"whole": [(70, 0), (19, 0)], "chunks": [(9, 300), (130, 64), (129, 127)], "long": [(300, 17)]}


@pytest.mark.parametrize("step", PROMPTS)
def test_prompts(launch, step, record_property):
    request = KVRequest("gqa", 2, 128, 128)
    made = prompts(Attention(4, 128**-0.5, request, "many"), request, PROMPTS[step])
    judge(launch, "attention", made, "paged_64", record_property)


@pytest.mark.parametrize("step", PROMPTS)
def test_latent_prompts(launch, step, record_property, monkeypatch):
    monkeypatch.setattr(launch.prefill_launch, "EXPANDED_BYTES", 1)  # one head at a time
    dims = MLADims(2, 128, 64, 128, 512)
    op = MLAExpanded(Linear(placeholder(512, 512)), dims, 192**-0.5, dims.request)
    made = prompts(op, dims.request, PROMPTS[step])
    judge(launch, "mla_expanded", made, "paged_64", record_property)
