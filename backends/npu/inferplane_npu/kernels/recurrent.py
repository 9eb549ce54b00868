"""Recurrent layers: the gated delta rule, token by token and in chunks, and the short causal convolution.

The vendor's states are `[V, K]` a head, core's `[K, V]`; its operators change the states that they are given, core's do
not, so each call works on a copy.

Source: pages of npu_recurrent_gated_delta_rule, npu_chunk_gated_delta_rule and npu_fused_causal_conv1d in
Ascend/op-plugin at 517f2e7d, and their docstrings in torch-npu 2.13.0, which are narrower: the narrower limit holds.
npu_fused_causal_conv1d_v2, without a page, is as the test there has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed import recurrent
from inferplane.kernels.fused.needs import HALF, declare_fused
from inferplane.plugin import Batch, Kernels, Packing
from inferplane_npu.kernels.when import OnNpu

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu")
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k, v, decay and beta."""
Recurrence = tuple[torch.Tensor, torch.Tensor]
"""The result, and the states after the step."""

LOWEST_DECAY = -1.0
"""Of a token in npu_chunk_gated_delta_rule, which may overflow below it."""
LOWEST_BETA, HIGHEST_BETA = 2.0**-126, 1 - 2.0**-8
"""The least and the greatest bfloat16 between 0 and 1, which that operator excludes."""
STATE_ERROR = 2.0**-8
"""Error of states that are rounded to bfloat16 before and after a step."""
FEW_TOKENS, MOST_SEQUENCES, PADDED = 8, 256, -1
"""Of the convolution: tokens a sequence in its form for decode steps, sequences of a call, and the mark of one that it
leaves out."""

HEADS = ("heads of 128 entries", lambda op: tuple(op.dims) == (128, 128))
FEW_HEADS = ("at most 64 heads", lambda op: op.heads[1] <= 64)
THREE_TAPS = ("a kernel of 3 without bias and activation", lambda op: _is_plain(op) and op.weight.shape[1] == 3)
CHANNELS = ("channels in whole 128s up to 16384", lambda op: _has_whole_channels(op.weight.shape[0]))
TAPS = Packing("torch_npu.taps", lambda w: w.t().contiguous())


def _is_plain(op: Any) -> bool:
    return op.bias is None and not op.silu


def _has_whole_channels(channels: int) -> bool:
    return channels % 128 == 0 and channels <= 16384


@fused(
    "gated_delta_rule",
    HEADS,
    FEW_HEADS,
    dtypes=(torch.bfloat16,),
    features=("bf16", "chunked-delta-rule-float32"),
    when=partial(OnNpu, step_kinds=("mixed",)),
    note="prompts; sequences with few tokens, and decays below -1, by torch's operators",
)
def gated_delta_rule(
    view: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> Recurrence:
    """npu_chunk_gated_delta_rule with states in float32."""
    return _run(view, (q, k, v, decay, beta), batch, state, few=_run_body)


@fused(
    "gated_delta_rule",
    HEADS,
    FEW_HEADS,
    dtypes=(torch.bfloat16,),
    features=("bf16", "recurrent-delta-rule"),
    when=OnNpu,
    extra_error=STATE_ERROR,
    note="states in bfloat16, as the operator has them; the op's are in float32",
)
def gated_delta_rule_bf16(
    view: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> Recurrence:
    """npu_recurrent_gated_delta_rule for at most 8 tokens a sequence, npu_chunk_gated_delta_rule for more; both round
    the states to bfloat16, so a pin alone chooses this kernel.
    """
    return _run(view, (q, k, v, decay, beta), batch, state, few=_run_tokens, dtype=torch.bfloat16)


def _run(
    view: Any,
    rows: Rows,
    batch: Batch,
    state: torch.Tensor,
    *,
    few: Callable[..., Recurrence],
    dtype: torch.dtype = torch.float32,
) -> Recurrence:
    """Sequences with few tokens by `few`, the others in chunks, with states in `dtype`. Their operator may overflow if
    decays are below -1; to know, this waits for the device, once a layer and step with a prompt.
    """
    first, rest = batch.split()
    if rest is None:
        return few(view, rows, batch, state)
    n, b = (0, 0) if first is None else (first.tokens, first.seq_lens.shape[0])
    if bool((rows[3][n:] < LOWEST_DECAY).any() | (rest.slots < 0).any()):
        return _run_body(view, rows, batch, state)
    q, k, v, decay, beta = rows
    y, after = _run_chunks((q[n:], k[n:], v[n:], decay[n:], beta[n:]), rest, state[b:], dtype)
    if first is None:
        return y, after
    y_few, after_few = few(view, (q[:n], k[:n], v[:n], decay[:n], beta[:n]), first, state[:b])
    return torch.cat((y_few, y)), torch.cat((after_few, after))


def _run_body(view: Any, rows: Rows, batch: Batch, state: torch.Tensor) -> Recurrence:
    """By torch's operators."""
    return recurrent.gated_delta_rule(view, *rows, batch, state)


def _run_tokens(view: Any, rows: Rows, batch: Batch, state: torch.Tensor) -> Recurrence:
    """Token by token. The operator stores a state for each token, and begins with the one at a sequence's first token.
    Padded rows, which come last, neither decay nor correct it.
    """
    q, k, v, decay, beta = rows
    starts, stops = batch.query_start[:-1].long(), batch.query_start[1:].long()
    real, counts = (batch.slots >= 0)[:, None], _count_real_rows(batch)
    states = v.new_zeros(*v.shape, q.shape[-1])
    states[starts] = _begin(state, batch, counts).mT.to(v.dtype)
    y = npu.npu_recurrent_gated_delta_rule(
        recurrent.normalize(q),
        recurrent.normalize(k),
        v.contiguous(),
        states,
        beta=torch.where(real, beta, 0.0).to(v.dtype),
        scale=q.shape[-1] ** -0.5,
        actual_seq_lengths=(stops - starts).int(),
        ssm_state_indices=torch.arange(v.shape[0], dtype=torch.int32, device=v.device),
        g=torch.where(real, decay, 0.0),
    )
    return y, torch.where(_widen(counts > 0, state), states[stops - 1].mT.float(), state)


def _run_chunks(rows: Rows, batch: Batch, state: torch.Tensor, dtype: torch.dtype) -> Recurrence:
    """In chunks of the operator's own; without padded rows."""
    q, k, v, decay, beta = rows
    lengths = batch.query_start[1:] - batch.query_start[:-1]
    y, after = npu.npu_chunk_gated_delta_rule(
        recurrent.normalize(q),
        recurrent.normalize(k),
        v.contiguous(),
        beta=beta.to(v.dtype).clamp(LOWEST_BETA, HIGHEST_BETA),
        initial_state=_begin(state, batch, lengths).mT.to(dtype).contiguous(),
        actual_seq_lengths=lengths.int(),
        scale=q.shape[-1] ** -0.5,
        g=decay.contiguous(),
    )
    return y, after.mT.float()


@fused(
    "causal_conv1d",
    THREE_TAPS,
    CHANNELS,
    dtypes=HALF,
    features=("causal-conv1d",),
    when=OnNpu,
    packs={"weight": TAPS},
)
def causal_conv1d(view: Any, x: torch.Tensor, batch: Batch, state: torch.Tensor) -> Recurrence:
    """npu_fused_causal_conv1d."""
    if state.shape[0] > MOST_SEQUENCES:
        plain = SimpleNamespace(weight=view.weight.t(), bias=None, silu=False)
        return recurrent.causal_conv1d(plain, x, batch, state)
    states, more = _prepare_convolution(batch, state)
    y = npu.npu_fused_causal_conv1d(x.contiguous(), view.weight, states, **more)
    return y, _last_inputs(states, state)


@fused(
    "short_conv",
    dtypes=HALF,
    features=("causal-conv1d",),
    when=OnNpu,
    inlines={"conv": ("torch_npu:causal_conv1d",)},
)
def short_conv(view: Any, x: torch.Tensor, batch: Batch, conv_state: torch.Tensor) -> Recurrence:
    """The op around that convolution, by npu_fused_causal_conv1d_v2, which writes its result over its input."""
    if conv_state.shape[0] > MOST_SEQUENCES:
        return view.body(x, batch, conv_state)
    b, c, h = view.proj(x).chunk(3, 1)
    mixed = b * h
    states, more = _prepare_convolution(batch, conv_state)
    npu.npu_fused_causal_conv1d_v2(mixed, view.conv.weight, states, **more)
    return view.o(c * mixed), _last_inputs(states, conv_state)


def _prepare_convolution(batch: Batch, state: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """A copy of the states `[B, rows, C]`, whose last rows the operator reads and writes, and its keyword arguments. In
    a step with at most 8 tokens a sequence it wants at least two rows more than a sequence has tokens.
    """
    counts = _count_real_rows(batch)
    spare = batch.max_query_tokens if batch.max_query_tokens <= FEW_TOKENS else 0
    places = torch.arange(state.shape[0], device=state.device)
    return F.pad(state.mT, (0, 0, spare, 0)).contiguous(), {
        "query_start_loc": batch.query_start.int(),
        "cache_indices": torch.where(counts > 0, places, PADDED).int(),
        "pad_slot_id": PADDED,
        "max_query_len": batch.max_query_tokens,
        "num_computed_tokens": (batch.seq_lens - counts).int(),
    }


def _last_inputs(states: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """States `[B, C, k - 1]` of the operator's."""
    return states[:, -like.shape[-1] :].mT


def _count_real_rows(batch: Batch) -> torch.Tensor:
    """`[B]`: a sequence's rows in this step without padded ones."""
    before = F.pad((batch.slots >= 0).cumsum(0), (1, 0))
    return before[batch.query_start[1:].long()] - before[batch.query_start[:-1].long()]


def _begin(state: torch.Tensor, batch: Batch, counts: torch.Tensor) -> torch.Tensor:
    """States `[B, H, K, V]` before the step: zeros for sequences all of whose tokens are in it."""
    return torch.where(_widen(batch.seq_lens == counts, state), 0.0, state)


def _widen(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flags `[B]` in a shape that broadcasts over `like` `[B, ...]`."""
    return flags.view(-1, *[1] * (like.ndim - 1))
