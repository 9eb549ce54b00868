"""The selective scan of Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.op import ACCUMULATED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.recurrent.ragged import draw_batch, each_chunk, run_ragged
from inferplane.types import Batch, Weight


class SelectiveScan(Op, name="selective_scan", hot=True):
    """The state space model of Mamba-2. A head's state S is `[P, N]` in float32.

    `dt = clamp(softplus(dt + dt_bias))`; for each token, in order: `S = exp(-exp(a_log) dt) S + dt x^T b;
    y = S c + skip x`. Each group of b and c serves as many heads, one after another, as there are per group. Sequences
    with many query tokens are computed in chunks of 64, which begin at multiples of 64 in the sequence.

    Args of the call:
        x: `[T, H, P]`. dt: `[T, H]`. b: `[T, G, N]`. c: `[T, G, N]`. All in the plan's dtype; may be strided.
        batch: the step. Rows with slot -1 are ignored.
        state: float32 `[B, H, P, N]`; not read for sequences that begin in this step.

    Returns:
        y, `[T, H, P]` in the dtype of `x` (padded rows are undefined), and the states after the step, float32
        `[B, H, P, N]`. No argument is changed.

    Fields: `a_log`, `dt_bias`, `skip` `[H]` each; `groups` G; `head_dim` P; `state_size` N; `dt_limits` the least and
    the largest dt.

    Source: Mamba-2, arXiv 2405.21060: the recurrence of its equation 1 with scalar A, chunks as in section 6.
    """

    tolerance = ACCUMULATED

    a_log: Weight
    dt_bias: Weight
    skip: Weight
    groups: int
    head_dim: int
    state_size: int
    dt_limits: tuple[float, float] = (0.0, math.inf)

    def __call__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        batch: Batch,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = x.shape[1] // self.groups
        dt = F.softplus(dt.float() + values(self.dt_bias)).clamp(*self.dt_limits)  # type: ignore[arg-type]
        decay = -values(self.a_log).exp() * dt  # type: ignore[arg-type]
        b, c = (t.float().repeat_interleave(shared, 1) for t in (b, c))
        y, after = run_ragged(batch, (x.float() * dt[..., None], decay, b, c), state, _step, _span)
        return (y + x.float() * values(self.skip)[:, None]).to(x.dtype), after  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """Bytes of the activations, and of one sequence's state read and written; the operations of the recurrence."""
        heads = self.a_log.shape[0]
        entries = heads * self.head_dim * self.state_size
        row = 2 * heads * self.head_dim + heads + 2 * self.groups * self.state_size
        return Cost(load.tokens * row * load.dtype.itemsize + 8.0 * entries, 5.0 * load.tokens * entries)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, first tokens, drafts, prompts, cut prompts and mixtures; groups; limits of dt."""

        def sample(
            label: str, sequences: Sequences, heads: int, groups: int, dim: int, size: int, **fields: Any
        ) -> Sample:
            def inputs(d: Draw) -> tuple[Any, ...]:
                batch = draw_batch(d, sequences)
                t = batch.tokens
                rows = d.normal(t, heads * dim + 2 * groups * size)  # strided, as a convolution's result is
                x, b, c = rows.split((heads * dim, groups * size, groups * size), 1)
                state = d.normal(len(sequences), heads, dim, size, dtype=torch.float32)
                b, c = (p.unflatten(1, (groups, size)) for p in (b, c))
                return x.unflatten(1, (heads, dim)), d.normal(t, heads), b, c, batch, state

            weight = lambda: placeholder(heads, dtype=torch.float32)  # noqa: E731
            op = SelectiveScan(weight(), weight(), weight(), groups, dim, size, **fields)
            return Sample(label, op, inputs, "decode" if max(n for n, _ in sequences) <= 8 else "mixed")

        return [
            sample("decode", [(1, 5), (1, 0), (1, 90)], 4, 2, 16, 32),
            sample("drafts", [(1, 40), (3, 64), (8, 127)], 3, 1, 32, 16),
            sample("prompts", [(70, 0), (19, 0)], 4, 1, 16, 32),
            sample("cut_prompts", [(9, 60), (64, 64), (130, 63)], 6, 3, 8, 16),
            sample("mixed", [(1, 100), (2, 0), (40, 0), (11, 60)], 4, 4, 16, 16),
            sample("limits", [(1, 9), (20, 3)], 4, 2, 16, 16, dt_limits=(0.9, 1.4)),
            sample("n128", [(1, 3), (66, 1)], 2, 1, 64, 128),
        ]


def _step(
    state: torch.Tensor, x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of B sequences; state `[B, H, P, N]`, x `[B, H, P]` times dt, decay `[B, H]`, b and c `[B, H, N]`."""
    state = state * decay.exp()[..., None, None] + x[..., None] * b[..., None, :]
    return torch.einsum("bhpn,bhn->bhp", state, c), state


def _span(state: torch.Tensor, before: int, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one sequence, chunk by chunk; state `[H, P, N]`, other tensors as in `_step` with tokens as B."""
    results = []
    for part in each_chunk(before, rows[0].shape[0]):
        x, decay, b, c = (t[part].transpose(0, 1) for t in rows)
        total = decay.cumsum(-1)  # [H, n]: the logarithm of what remains of the state before the chunk
        apart = (total[:, :, None] - total[:, None]).tril().exp().tril()  # [H, n, n]: from token j to token i
        y = total.exp()[..., None] * (c @ state.mT) + (c @ b.mT * apart) @ x
        last = total[:, -1:]
        state = last.exp()[..., None] * state + (x * (last - total).exp()[..., None]).mT @ b
        results.append(y.transpose(0, 1))
    return torch.cat(results), state
