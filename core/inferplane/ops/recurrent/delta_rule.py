"""The gated delta rule: a linear attention whose state forgets, and corrects what it recalls for a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.op import ACCUMULATED, ROUNDED, Cost, Op, Sample, Workload, extension, placeholder, values
from inferplane.ops.recurrent.ragged import draw_batch, each_chunk, run_ragged
from inferplane.types import Batch, Weight

NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key."""
SPAN_TOKENS = 16
"""Tokens of a chunk between which decays by channel are multiplied one by one. Products over longer distances are split
where a span begins, so that no factor exceeds 1."""


class DeltaRuleGates(Op, name="delta_rule_gates"):
    """`decay = -exp(a_log) * softplus(a + dt_bias); beta = sigmoid(b)`, in float32.

    With `by_channel` the K entries of a head's keys have a decay each, with one rate `exp(a_log)` a head.

    Args of the call:
        a: `[T, H]`, with `by_channel` `[T, H K]`. b: `[T, H]`. Both in the plan's dtype; may be strided.

    Returns:
        decay, float32 in the shape of `a`, and beta, float32 `[T, H]`: the logarithm of what remains of the state (at
        most 0), and the share of the correction (0 to 1).

    Fields: `a_log` `[H]`; `dt_bias` `[H]`, with `by_channel` `[H K]`.

    Source: Gated DeltaNet, arXiv 2412.06464, with the decay of Mamba-2, arXiv 2405.21060; by channel: Kimi Linear,
    arXiv 2510.26692.
    """

    tolerance = ROUNDED

    a_log: Weight
    dt_bias: Weight
    by_channel: bool = extension(False)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate = values(self.a_log).exp()  # type: ignore[arg-type]
        if self.by_channel:
            rate = rate.repeat_interleave(a.shape[1] // rate.shape[0])
        return -rate * F.softplus(a.float() + values(self.dt_bias)), b.float().sigmoid()  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """Bytes of two reads in the plan's dtype and two writes in float32."""
        n = load.tokens * (self.a_log.shape[0] + self.dt_bias.shape[0])
        return Cost(1.0 * n * (load.dtype.itemsize + 4), 5.0 * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token; strided rows; values where softplus is its argument; decays by channel."""
        at = lambda heads, k=0: DeltaRuleGates(  # noqa: E731
            placeholder(heads, dtype=torch.float32), placeholder(heads * (k or 1), dtype=torch.float32), k > 0
        )
        return [
            Sample("t1", at(4), lambda d: (d.normal(1, 4), d.normal(1, 4))),
            Sample("strided", at(6), lambda d: tuple(d.normal(9, 12).chunk(2, 1))),
            Sample("large", at(3), lambda d: (d.normal(5, 3, scale=30.0), d.normal(5, 3, scale=9.0))),
            Sample("channels_t1", at(2, 16), lambda d: (d.normal(1, 32), d.normal(1, 2))),
            Sample("channels", at(3, 24), lambda d: d.normal(7, 83, scale=4.0)[:, 8:].split((72, 3), 1)),
        ]


class GatedDeltaRule(Op, name="gated_delta_rule", hot=True):
    """Linear attention with the gated delta rule. A head's state S maps keys to values, `[K, V]` in float32.

    For each token, in order: `S = exp(decay) S; S = S + k^T (beta (v - k S)); y = q S / sqrt(K)`. q and k are divided
    by their lengths first. Each head of q and k serves as many heads of v, one after another, as there are per head of
    q and k. Sequences with many query tokens are computed in chunks of 64, which begin at multiples of 64 in the
    sequence: in a chunk, the corrections of all tokens are the solution of one triangular system.

    With `by_channel` each row of S, one a channel of the keys, has a decay of its own: `S = diag(exp(decay)) S`.

    Args of the call:
        q: `[T, G, K]`. k: `[T, G, K]`. v: `[T, H, V]`. All in the plan's dtype; may be strided.
        decay: float32 `[T, H]`, with `by_channel` `[T, H K]`, at most 0. beta: float32 `[T, H]`.
        batch: the step. Rows with slot -1 are ignored.
        state: float32 `[B, H, K, V]`; not read for sequences that begin in this step.

    Returns:
        y, `[T, H, V]` in the dtype of `v` (padded rows are undefined), and the states after the step, float32
        `[B, H, K, V]`. No argument is changed.

    Fields: `heads` (G, H); `dims` (K, V); `by_channel`.

    Source: Gated DeltaNet, arXiv 2412.06464; chunks as in DeltaNet, arXiv 2406.06484, section 3.2; by channel: Kimi
    Linear, arXiv 2510.26692.
    """

    tolerance = ACCUMULATED

    heads: tuple[int, int]
    dims: tuple[int, int]
    by_channel: bool = extension(False)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        batch: Batch,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = self.heads[1] // self.heads[0]
        q, k = (_normalize(t.float()).repeat_interleave(shared, 1) for t in (q, k))
        decay = decay.unflatten(1, (self.heads[1], -1))  # [T, H, K] by channel, else [T, H, 1]
        rows, span = (
            (q * self.dims[0] ** -0.5, k, v.float(), decay, beta),
            _span_by_channel if self.by_channel else _span,
        )
        y, after = run_ragged(batch, rows, state, _step, span)
        return y.to(v.dtype), after

    def cost(self, load: Workload) -> Cost:
        """Bytes of the activations, and of one sequence's state read and written; the operations of the recurrence."""
        (groups, heads), (k, v) = self.heads, self.dims
        gates = 4 * heads * (1 + (k if self.by_channel else 1))
        moved = load.tokens * ((2 * groups * k + 2 * heads * v) * load.dtype.itemsize + gates)
        return Cost(moved + 8.0 * heads * k * v, 7.0 * load.tokens * heads * k * v)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, first tokens, drafts, prompts, cut prompts and mixtures; shared keys; unequal dims; decays by
        channel, of some of which nothing remains."""

        def sample(
            label: str, sequences: Sequences, heads: tuple[int, int], dims: tuple[int, int], *, decay: float = 0.0
        ) -> Sample:
            (groups, n), (k, v) = heads, dims
            rates = n * k if decay else n

            def inputs(d: Draw) -> tuple[Any, ...]:
                batch = draw_batch(d, sequences)
                rows = d.normal(batch.tokens, 2 * groups * k + n * v)  # strided, as a convolution's result is
                q, key, value = rows.split((groups * k, groups * k, n * v), 1)
                gates = -d.uniform(batch.tokens, rates, high=decay or 0.5), d.uniform(batch.tokens, n)
                state = d.normal(len(sequences), n, k, v, dtype=torch.float32)
                split = q.unflatten(1, (groups, k)), key.unflatten(1, (groups, k)), value.unflatten(1, (n, v))
                return *split, *gates, batch, state

            kind: Any = "decode" if max(tokens for tokens, _ in sequences) <= 8 else "mixed"
            return Sample(label, GatedDeltaRule(heads, dims, decay > 0), inputs, kind)

        return [
            sample("decode", [(1, 5), (1, 0), (1, 90)], (2, 4), (32, 32)),
            sample("drafts", [(1, 40), (3, 64), (8, 127)], (2, 2), (16, 32)),
            sample("prompts", [(70, 0), (19, 0)], (2, 4), (32, 16)),
            sample("cut_prompts", [(9, 60), (64, 64), (130, 63)], (1, 3), (16, 16)),
            sample("mixed", [(1, 100), (2, 0), (40, 0), (11, 60)], (2, 4), (32, 32)),
            sample("d128", [(1, 3), (66, 1)], (1, 2), (128, 128)),
            sample("d128_decode", [(1, 9), (1, 0), (3, 70)], (1, 2), (128, 128)),
            sample("channels_decode", [(1, 5), (1, 0), (3, 90)], (4, 4), (32, 32), decay=1.0),
            sample("channels_mixed", [(1, 100), (2, 0), (40, 0), (130, 60)], (2, 4), (16, 32), decay=9.0),
            sample("channels_d128", [(1, 3), (66, 1)], (2, 2), (128, 128), decay=0.5),
        ]


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of B sequences; state `[B, H, K, V]`, q and k `[B, H, K]`, v `[B, H, V]`, decay `[B, H, 1]` or
    `[B, H, K]`, beta `[B, H]`."""
    state = state * decay.exp()[..., None]
    recalled = torch.einsum("bhk,bhkv->bhv", k, state)
    state = state + k[..., None] * (beta[..., None] * (v - recalled))[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", q, state), state


def _span(state: torch.Tensor, before: int, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one sequence, chunk by chunk; state `[H, K, V]`, other tensors as in `_step` with tokens as B."""
    results = []
    for part in each_chunk(before, rows[0].shape[0]):
        q, k, v, decay, beta = (t[part].transpose(0, 1) for t in rows)
        total = decay[..., 0].cumsum(-1)  # [H, n]: the logarithm of what remains of the state before the chunk
        apart = (total[:, :, None] - total[:, None]).tril().exp().tril()  # [H, n, n]: from token j to token i
        system = (k @ k.mT * apart * beta[..., None]).tril(-1)
        recalled = total.exp()[..., None] * (k @ state)
        corrections = torch.linalg.solve_triangular(
            system, beta[..., None] * (v - recalled), upper=False, unitriangular=True
        )
        y = total.exp()[..., None] * (q @ state) + (q @ k.mT * apart) @ corrections
        last = total[:, -1:]
        state = last.exp()[..., None] * state + (k * (last - total).exp()[..., None]).mT @ corrections
        results.append(y.transpose(0, 1))
    return torch.cat(results), state


def _span_by_channel(state: torch.Tensor, before: int, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_span` with a decay for each row of the state, `[n, H, K]`."""
    results = []
    for part in each_chunk(before, rows[0].shape[0]):
        q, k, v, decay, beta = (t[part].transpose(0, 1) for t in rows)
        total = decay.cumsum(1)  # [H, n, K]: the logarithm of what remains of the state before the chunk
        recalled = (k * total.exp()) @ state
        corrections = torch.linalg.solve_triangular(
            (_multiply_decayed(k, k, total) * beta[..., None]).tril(-1),
            beta[..., None] * (v - recalled),
            upper=False,
            unitriangular=True,
        )
        y = (q * total.exp()) @ state + _multiply_decayed(q, k, total) @ corrections
        last = total[:, -1:]
        state = last.exp().mT * state + (k * (last - total).exp()).mT @ corrections
        results.append(y.transpose(0, 1))
    return torch.cat(results), state


def _multiply_decayed(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`y[i, j] = sum over c of x[i, c] k[j, c] exp(total[i, c] - total[j, c])` for j up to i, else 0: `[H, n, n]` from
    tensors `[H, n, K]`, of which `total` does not increase from token to token."""
    heads, n, _ = x.shape
    y = x.new_zeros(heads, n, n)
    for start in range(0, n, SPAN_TOKENS):
        span = slice(start, start + SPAN_TOKENS)
        apart = (total[:, span, None] - total[:, None, span]).clamp(max=0).exp()  # [H, i, j, K]
        y[:, span, span] = (x[:, span, None] * k[:, None, span] * apart).sum(-1)
        first = total[:, start : start + 1]
        earlier = k[:, :start] * (first - total[:, :start]).exp()
        y[:, span, :start] = (x[:, span] * (total[:, span] - first).exp()) @ earlier.mT
    return y.tril()
