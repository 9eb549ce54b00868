"""Recurrent ops: against transformers' functions, and over steps that cut a sequence anywhere."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearRMSNormGated,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from inferplane.ops import CausalConv1d, Draw, GatedDeltaRule, GatedRMSNorm, SelectiveScan
from inferplane.ops.recurrent.ragged import draw_batch, each_chunk
from tests.unit.support.small import F32

GROUPS, HEADS, DIM, STATE = 2, 6, 16, 24
CUTS = [
    pytest.param([130], id="whole"),
    pytest.param([7] * 18 + [4], id="chunks_of_7"),
    pytest.param([1] * 130, id="single_tokens"),
    pytest.param([60, 1, 3, 40, 26], id="ragged"),
]


def numbers(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def close(got, want, tolerance=1e-5):
    assert got.shape == want.shape
    return (got - want).abs().max() <= tolerance * want.abs().max()


def run_cut(op, rows, state, cuts):
    """The op over one sequence in steps of these sizes; states that must not be read hold NaN before the first."""
    results, before, state = [], 0, torch.full_like(state, torch.nan)
    for n in cuts:
        batch = draw_batch(Draw(0, F32), [(n, before)])
        y, state = op(*(t[before : before + n] for t in rows), batch, state)
        results.append(y)
        before += n
    return torch.cat(results), state


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("size", "bias", "silu"), [(4, False, True), (3, True, False), (4, True, True), (1, True, True)]
)
def test_convolution(cuts, size, bias, silu):
    x, weight, b = numbers(130, 20), numbers(20, size, seed=1), numbers(20, seed=2) if bias else None
    want = causal_conv1d_fn(x.t()[None], weight, b, "silu" if silu else None)[0].t()
    y, state = run_cut(CausalConv1d(weight, b, silu), (x,), torch.empty(1, 20, size - 1), cuts)
    assert close(y, want, 2e-6)
    assert torch.equal(state[0], x[len(x) - size + 1 :].t())


def delta_inputs(tokens):
    q, k = numbers(tokens, GROUPS, DIM), numbers(tokens, GROUPS, DIM, seed=1)
    v, decay = numbers(tokens, HEADS, STATE, seed=2), -F.softplus(numbers(tokens, HEADS, seed=3))
    return q, k, v, decay, numbers(tokens, HEADS, seed=4).sigmoid()


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("reference", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_gated_delta_rule(cuts, reference):
    rows = delta_inputs(130)
    repeated = [t[None].repeat_interleave(HEADS // GROUPS, 2) for t in rows[:2]]
    want, last = reference(
        *repeated, *(t[None] for t in rows[2:]), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    op = GatedDeltaRule((GROUPS, HEADS), (DIM, STATE))
    y, state = run_cut(op, rows, torch.empty(1, HEADS, DIM, STATE), cuts)
    assert close(y, want[0]) and close(state, last)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("reference", [chunk_kimi_delta_attention, recurrent_kimi_delta_attention])
@pytest.mark.parametrize("fastest", [1.0, 40.0])
def test_delta_rule_with_decays_by_channel(cuts, reference, fastest):
    """With channels that forget all within a token beside others that forget nothing."""
    q, k, v, _, beta = delta_inputs(130)
    q, k = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (q, k))
    decay = -F.softplus(numbers(130, HEADS, DIM, seed=3)) * torch.linspace(0, fastest, DIM)
    rows = q, k, v, decay, beta
    flags = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want, last = reference(*(t[None] for t in rows), **flags)
    op = GatedDeltaRule((HEADS, HEADS), (DIM, STATE), by_channel=True)
    y, state = run_cut(op, (q, k, v, decay.flatten(1), beta), torch.empty(1, HEADS, DIM, STATE), cuts)
    assert close(y, want[0]) and close(state, last)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.3, 0.8)])
def test_selective_scan(cuts, limits):
    x, dt = numbers(130, HEADS, DIM), numbers(130, HEADS, seed=1)
    b, c = numbers(130, GROUPS, STATE, seed=2), numbers(130, GROUPS, STATE, seed=3)
    a_log, dt_bias, skip = (numbers(HEADS, seed=seed) for seed in (4, 5, 6))
    want, last = mamba2_chunk_scan(
        *(t[None] for t in (x, dt)),
        -a_log.exp(),
        *(t[None] for t in (b, c)),
        chunk_size=32,
        D=skip,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    op = SelectiveScan(a_log, dt_bias, skip, GROUPS, DIM, STATE, limits)
    y, state = run_cut(op, (x, dt, b, c), torch.empty(1, HEADS, DIM, STATE), cuts)
    assert close(y, want[0]) and close(state, last)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm(groups, gate_first):
    x, gate, weight = numbers(5, 32, scale=3.0), numbers(5, 32, seed=1), numbers(32, seed=2)
    others = [FalconH1RMSNormGated(32, 1e-5, groups, norm_before_gate=not gate_first)]
    if gate_first:
        others.append(MambaRMSNormGated(32, 32 // groups, 1e-5))
    elif groups == 1:
        others.append(Qwen3NextRMSNormGated(32, 1e-5))
    for other in others:
        other.weight.data.copy_(weight)
        assert close(GatedRMSNorm(weight, 1e-5, groups, gate_first)(x, gate), other(x, gate), 2e-6)


def test_gated_norm_with_a_sigmoid():
    x, gate, weight = numbers(5, 32, scale=3.0), numbers(5, 32, seed=1), numbers(32, seed=2)
    other = KimiLinearRMSNormGated(32, 1e-5)
    other.weight.data.copy_(weight)
    assert close(GatedRMSNorm(weight, 1e-5, act="sigmoid")(x, gate), other(x, gate), 2e-6)


def test_sequences_of_a_step_do_not_mix():
    """A ragged step equals each of its sequences by itself, with states of several steps before."""
    sequences = [(1, 5), (1, 0), (3, 70), (40, 0), (9, 3)]
    batch = draw_batch(Draw(0, F32), sequences)
    rows, state = delta_inputs(batch.tokens), numbers(5, HEADS, DIM, STATE, seed=7)
    op = GatedDeltaRule((GROUPS, HEADS), (DIM, STATE))
    y, after = op(*rows, batch, state)
    start = 0
    for i, (n, before) in enumerate(sequences):
        alone = draw_batch(Draw(0, F32), [(n, before)])
        own, own_after = op(*(t[start : start + n] for t in rows), alone, state[i : i + 1])
        assert close(y[start : start + n], own, 1e-6) and close(after[i : i + 1], own_after, 1e-6)
        start += n


@pytest.mark.parametrize("host_lens", [True, False])
def test_padding(host_lens):
    """Captured steps: a padded sequence leaves its state alone; rows padded before a sequence's own are ignored."""
    full = draw_batch(Draw(0, F32), [(3, 1), (3, 20), (3, 0)])
    slots, lens = full.slots.clone(), full.seq_lens.clone()
    slots[:2] = slots[6:] = -1  # the first sequence has one token of its own, the last is padding
    lens[0], lens[2] = 2, 0
    padded = replace(full, slots=slots, seq_lens=lens, host_lens=full.host_lens if host_lens else None)
    rows, state = delta_inputs(9), numbers(3, HEADS, DIM, STATE, seed=7)
    op = GatedDeltaRule((GROUPS, HEADS), (DIM, STATE))
    y, after = op(*rows, padded, state)
    own, own_after = op(*(t[2:6] for t in rows), draw_batch(Draw(0, F32), [(1, 1), (3, 20)]), state[:2])
    assert close(y[2:6], own, 1e-6) and close(after[:2], own_after, 1e-6)
    assert torch.equal(after[2], state[2])


def test_chunks_end_at_multiples_in_the_sequence():
    assert [(c.start, c.stop) for c in each_chunk(60, 100)] == [(0, 4), (4, 68), (68, 100)]
    assert [(c.start, c.stop) for c in each_chunk(128, 64)] == [(0, 64)]
