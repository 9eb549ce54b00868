"""Experts that a table chooses by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.collective import AllReduce
from inferplane.ops.forms.mlp import MLP
from inferplane.ops.linear import GatedMLP, Linear
from inferplane.ops.moe import NONZERO, MoEExperts, MoERoute, cost_of_experts, score_experts
from inferplane.ops.op import BLOCK, Comparison, Cost, Op, Sample, Workload, placeholder
from inferplane.types import Weight


class HashRoute(Op, name="hash_route", extension=True):
    """Look up a token's experts by its id, and weigh them by the router's logits, in float32.

    `chosen = table[ids] mod E; weights = score(logits)[chosen]`, divided when `renormalize` by their sum, times
    `factor`. So a damaged table names no expert that is not there. The cost is not counted: it is small beside the
    experts.

    Args of the call:
        logits: float32 `[T, E]`. ids: int64 `[T]`, token ids.

    Returns:
        weights float32 `[T, k]`, chosen int64 `[T, k]`; the order within a token is free.

    Fields: `table` int32 `[V, k]`; `score` as in `moe_route`; `renormalize`; `factor`.

    Source: hash layers, arXiv 2106.04426; weighed by a learned router as in DeepSeek-V4 (transformers'
    DeepseekV4HashRouter).
    """

    compares_entries = False
    tolerance = MoERoute.tolerance
    body_capture_safe = True

    table: Weight
    score: str = "sqrtsoftplus"
    renormalize: bool = True
    factor: float = 1.0

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.table.shape[1]

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.table[ids].long() % logits.shape[1]  # type: ignore[index]
        weights = score_experts(logits.float(), self.score).gather(1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + NONZERO)
        return weights * self.factor, chosen

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """See `MoERoute.compare`."""
        return MoERoute.compare(got, want)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Each score, one token and several, weights as they are."""

        def at(label: str, tokens: int, score: str, experts: int = 8, **fields: Any) -> Sample:
            op = HashRoute(hash_table(97, 2, experts), score, **fields)
            inputs = lambda d: (d.normal(tokens, experts, dtype=torch.float32), d.ints(tokens, below=97))  # noqa: E731
            return Sample(label, op, inputs, "decode" if tokens == 1 else "mixed")

        return [
            at("t1", 1, "sqrtsoftplus", factor=1.5),
            at("t13", 13, "sqrtsoftplus", 16, factor=1.5),
            at("sigmoid", 5, "sigmoid"),
            at("softmax", 5, "softmax", renormalize=False, factor=2.5),
        ]


class HashMoE(Op, name="hash_moe", extension=True):
    """A mixture of experts that token ids choose: `y = experts(x, route(router(x), ids)) + shared(x)`.

    Under expert parallelism other ranks compute the experts that are not `here`, and `reduce` sums over the ranks.

    Args of the call:
        x: `[T, D]`. ids: int64 `[T]`, the step's token ids.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: as of `moe`.

    Source: hash layers, arXiv 2106.04426; DeepSeek-V4 (transformers' DeepseekV4SparseMoeBlock).
    """

    tolerance = BLOCK

    router: Linear
    route: HashRoute
    experts: MoEExperts
    shared: GatedMLP | MLP | None = None
    reduce: AllReduce | None = None
    here: tuple[int, int] | None = None

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(self.router(x), ids)
        if self.here is not None:
            first, count = self.here
            chosen = torch.where((chosen >= first) & (chosen < first + count), chosen - first, -1)
        y = self.experts(x, weights, chosen)
        if self.shared is not None:
            y = y + self.shared(x)
        return y if self.reduce is None else self.reduce(y)

    def cost(self, load: Workload) -> Cost:
        """Router, shared MLP, and the chosen experts: at most `tokens * k` of them are read."""
        others = [op.cost(load) for op in (self.router, self.shared) if op is not None]
        return sum(others, cost_of_experts(self.experts, self.route.top_k, load))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a shared MLP, half of the experts."""

        def layer(count: int = 8) -> HashMoE:
            return HashMoE(
                Linear(placeholder(8, 64), out_dtype=torch.float32),
                HashRoute(hash_table(97, 2, 8), factor=1.5),
                MoEExperts(placeholder(count, 64, 64), placeholder(count, 64, 32), count < 8),
                GatedMLP(Linear(placeholder(64, 64)), Linear(placeholder(64, 32))),
                here=(8 - count, count) if count < 8 else None,
            )

        inputs = lambda t: lambda d: (d.normal(t, 64), d.ints(t, below=97))  # noqa: E731
        return [
            Sample("t1", layer(), inputs(1), "decode"),
            Sample("t12", replace(layer(), shared=None), inputs(12)),
            Sample("partial", layer(4), inputs(7)),
        ]


def hash_table(vocab: int, chosen: int, experts: int) -> Weight:
    """A sample's table of `chosen` different experts for each token id, int32 `[vocab, chosen]`."""

    def make() -> torch.Tensor:
        first = torch.arange(vocab)[:, None] * 5
        return ((first + torch.arange(chosen) * 3) % experts).int()

    return Weight((), (vocab, chosen), torch.int32, make=make)
