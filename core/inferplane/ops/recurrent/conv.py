"""The short causal convolution over tokens that recurrent layers apply to their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.op import ROUNDED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.recurrent.ragged import draw_batch, run_ragged
from inferplane.types import Batch, Weight


class CausalConv1d(Op, name="causal_conv1d"):
    """`y[t] = f(sum over i < k of weight[:, i] * x[t - k + 1 + i] + bias)`, each channel by itself, along a sequence.

    Inputs before the sequence's first token are zero. Those of earlier steps are in the state: the last k - 1 inputs,
    the oldest first. Sums are in float32, rounded once; f is silu or nothing.

    Args of the call:
        x: `[T, C]` in the plan's dtype; may be strided.
        batch: the step. Rows with slot -1 are ignored.
        state: `[B, C, k - 1]` in the plan's dtype; not read for sequences that begin in this step.

    Returns:
        y, `[T, C]` in the dtype of `x` (padded rows are undefined), and the states after the step, `[B, C, k - 1]`.
        No argument is changed.

    Fields: `weight` `[C, k]`; `bias` `[C]` or None; `silu`.

    Source: Mamba, arXiv 2312.00752, section 3.4.
    """

    tolerance = ROUNDED

    weight: Weight
    bias: Weight | None = None
    silu: bool = True

    def __call__(self, x: torch.Tensor, batch: Batch, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = values(self.weight)  # type: ignore[arg-type]
        bias = None if self.bias is None else values(self.bias)  # type: ignore[arg-type]
        tail = weight.shape[1] - 1

        def convolve(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
            y = inputs[0].float() * weight[:, 0]
            for i in range(1, tail + 1):
                y.addcmul_(inputs[i].float(), weight[:, i])
            y = y if bias is None else y + bias
            return (F.silu(y) if self.silu else y).to(x.dtype)

        def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.cat((state, x[:, :, None]), -1)  # [B, C, k]; if k is 1, the states have no entries
            return convolve((*state.unbind(-1), x)), inputs[:, :, 1:]

        def span(state: torch.Tensor, before: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.cat((state.t(), x))  # [k - 1 + n, C]
            n = x.shape[0]
            return convolve([inputs[i : i + n] for i in range(tail + 1)]), inputs[n:].t()

        return run_ragged(batch, (x,), state, step, span)

    def cost(self, load: Workload) -> Cost:
        """Bytes of one read and one write; two operations per multiply-add."""
        n = load.tokens * self.weight.shape[0]
        return Cost(2 * n * load.dtype.itemsize, 2.0 * n * self.weight.shape[1])

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, first tokens, drafts, prompts and mixtures; kernels of 1, 3 and 4; with and without bias and silu;
        whole 128s of channels."""

        def sample(
            label: str, sequences: Sequences, channels: int, size: int, *, bias: bool = False, silu: bool = True
        ) -> Sample:
            def inputs(d: Draw) -> tuple[Any, ...]:
                batch = draw_batch(d, sequences)
                x = d.normal(batch.tokens, channels + 8)[:, 8:]  # strided, as a part of a projection is
                return x, batch, d.normal(len(sequences), channels, size - 1)

            op = CausalConv1d(placeholder(channels, size), placeholder(channels) if bias else None, silu)
            return Sample(label, op, inputs, "decode" if max(n for n, _ in sequences) <= 8 else "mixed")

        return [
            sample("decode", [(1, 5), (1, 0), (1, 90)], 64, 4),
            sample("drafts", [(1, 40), (3, 1), (8, 127)], 48, 4, bias=True),
            sample("short_prompts", [(1, 0), (2, 0), (3, 2)], 32, 4),
            sample("prompts", [(33, 0), (9, 64)], 96, 4, bias=True),
            sample("mixed", [(1, 7), (2, 0), (70, 0), (19, 3)], 40, 3, silu=False),
            sample("bias_without_silu", [(1, 1), (12, 1)], 32, 3, bias=True, silu=False),
            sample("kernel_of_1_decode", [(1, 6), (1, 0), (3, 40)], 32, 1, bias=True),
            sample("kernel_of_1_mixed", [(1, 6), (2, 0), (33, 0), (9, 20)], 32, 1),
            sample("c128_decode", [(1, 3), (4, 0), (2, 70)], 128, 3, silu=False),
            sample("c128_mixed", [(1, 5), (3, 0), (21, 0), (9, 1)], 128, 3, silu=False),
        ]
