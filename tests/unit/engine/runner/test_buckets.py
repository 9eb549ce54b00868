"""Sizes of recorded steps: no padding dearer than it may be, no more memory than there is, and explain tells."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shapes import REAL
from inferplane.binding import format_captured_steps
from inferplane.engine import ModelFiles, Runner, RunnerOptions, describe_captured_steps
from inferplane.engine.runner.buckets import PADDING, Buckets, Size, bucket_sizes, choose_sizes, step_cost
from inferplane.plugins import host


def flat(rows: int) -> float:
    return 1000.0 + rows


def steep(rows: int) -> float:
    return float(rows)


def ten_a_row(size: Size) -> int:
    return 10 * size.sequences * size.tokens


@pytest.mark.parametrize("cost", [flat, steep])
@pytest.mark.parametrize("most", [1, 2, 7, 256])
@pytest.mark.parametrize("tokens", [(1,), (1, 3)])
def test_padding_costs_no_more_than_it_may(cost, most, tokens):
    sizes = choose_sizes(cost, ten_a_row, None, most, tokens)
    assert sizes.sequences[-1] == most and list(sizes.sequences) == sorted(set(sizes.sequences))
    for n in range(1, most + 1):
        size = sizes.smallest_for(n, tokens[-1])
        assert size.sequences >= n
        assert cost(size.sequences * size.tokens) <= (1 + PADDING) * cost(n * size.tokens)
    assert sizes.nbytes == sum(10 * n * t for n in sizes.sequences for t in tokens)


def test_a_flat_cost_needs_few_sizes_and_a_steep_one_many():
    assert len(choose_sizes(flat, ten_a_row, None, 100).sequences) == 1
    assert choose_sizes(steep, ten_a_row, None, 20).sequences == (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 18, 20)


def test_memory_makes_sizes_fewer_and_padding_dearer():
    free = choose_sizes(steep, ten_a_row, None, 64)
    tight = choose_sizes(steep, ten_a_row, free.nbytes // 3, 64)
    assert tight.nbytes <= free.nbytes // 3 and tight.padding > free.padding == PADDING
    assert tight.sequences[-1] == 64 and set(tight.sequences) < set(range(1, 65))
    assert choose_sizes(steep, ten_a_row, 0, 64).sequences == (64,), "one size at least"


def test_what_no_size_holds():
    sizes = Buckets((1, 4), (1, 3))
    assert sizes.smallest_for(2, 2) == Size(4, 3) and sizes.smallest_for(1, 1) == Size(1, 1)
    assert sizes.smallest_for(5, 1) is None and sizes.smallest_for(1, 4) is None


def test_models_of_the_bars():
    """Weights outweigh everything in a dense model, so few sizes do; experts make each further token dearer."""
    counts = {}
    for name, config in REAL.items():
        runner = Runner.plan_only(ModelFiles(config), host(), "cpu", RunnerOptions(dtype="bfloat16", max_num_seqs=64))
        sizes = bucket_sizes(runner.plan, runner.options, 4096)
        cost = step_cost(runner.model, torch.bfloat16)
        for n in (1, 3, 17, 64):
            assert cost(sizes.smallest_for(n, 1).sequences) <= (1 + PADDING) * cost(n)
        counts[name] = len(sizes.sequences)
        few = bucket_sizes(runner.plan, runner.options, 4096, free_bytes=int(20 * 0.8 * sizes.nbytes))
        assert (few.sequences[-1] == 64 and few.nbytes <= 0.8 * sizes.nbytes) or few.sequences == (64,)
    assert counts["Llama-8B"] < counts["DeepSeek-V2-Lite"]


def test_steps_of_latent_attention_are_recorded():
    """Its expanded form serves prompts, and needs lengths on the host: decode steps have none of it."""
    config = {**REAL["DeepSeek-V2-Lite"], "num_hidden_layers": 2}
    for ops, off in (({}, False), ({"mla_block": "absorbed"}, False), ({"mla_block": "expanded"}, True)):
        runner = Runner.plan_only(ModelFiles(config), host(), "cuda", RunnerOptions(dtype="bfloat16", ops=ops))
        assert bool(describe_captured_steps(runner)["off"]) == off, describe_captured_steps(runner)


def test_explain_tells():
    runner = Runner.plan_only(ModelFiles("demo"), host(), "cuda", RunnerOptions(dtype="bfloat16", num_drafts=2))
    told = describe_captured_steps(runner)
    assert told["off"] == "" and told["tokens"] == [1, 3] and told["sequences"][-1] == 32
    assert "1 or 3 tokens each" in format_captured_steps(told) and "MiB" in format_captured_steps(told)
    runner = Runner.plan_only(ModelFiles("demo"), host(), "cuda", RunnerOptions(dtype="bfloat16", capture=False))
    assert format_captured_steps(describe_captured_steps(runner)) == "decode steps are not captured: capture=False"
    runner = Runner.plan_only(ModelFiles("demo"), host(), "cpu", RunnerOptions())
    assert describe_captured_steps(runner)["off"]
