"""Mixture of experts: routing, the experts, the layer around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from inferplane.ops.clamped_experts import ClampedExperts
from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw
from inferplane.ops.forms.activation import ACTIVATIONS, multiply_gate
from inferplane.ops.forms.mlp import MLP
from inferplane.ops.linear import GatedMLP, Linear
from inferplane.ops.op import (
    BLOCK,
    EXTENSIONS,
    Comparison,
    Cost,
    Op,
    Sample,
    Workload,
    expert_values,
    extension,
    placeholder,
    relative_error,
    values,
)
from inferplane.types import HOST, Weight

TUNING_EXPERTS = 8
"""Experts per token in `MoEExperts.tuning_inputs`."""


NONZERO = 1e-20
"""Added to sums of scores, which are 0 if all scores are too small for float32."""
SQRT_SOFTPLUS = "moe_route.sqrtsoftplus"
"""The extension of routes whose scores are neither sigmoids nor a softmax."""
EXTENSIONS.add(SQRT_SOFTPLUS)


class MoERoute(Op, name="moe_route"):
    """Choose `top_k` experts per token and their weights from the router's logits, in float32.

    `score = sigmoid(logits)`, `softmax(logits)` or, as "sqrtsoftplus", `sqrt(ln(1 + exp(logits)))`;
    `choice = score + bias` (the bias affects the choice alone). With groups, only the best `top_groups` groups remain;
    a group's score is the sum of its two best choices ("top2") or its best one ("max").
    `ids = topk(choice)`; `weights = score[ids]`, divided when `renormalize` by `max(sum, least_sum) + sum_eps`, times
    `factor`.
    With `jitter` e, a logit counts as near the largest m if it is at most `2 e max(|logit|, m)` below it. The largest
    is chosen, its weight is its softmax among those near it, and so on with those that remain, without `renormalize`.
    The cost is not counted: it is small beside the experts.

    Args of the call:
        logits: float32 `[T, E]`.

    Returns:
        weights float32 `[T, top_k]`, ids int64 `[T, top_k]`; the order within a token is free.

    Fields: `bias` `[E]` or None; `score`; `groups` (1: no grouping); `top_groups`; `group_score`; `top_k`;
    `renormalize`; `factor`; `least_sum`; `jitter`; `sum_eps`.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2 (sigmoid, bias, groups); DeepSeek-V2, arXiv 2405.04434
    (softmax, device-limited groups); Mixtral, arXiv 2401.04088 (softmax, top-k, renormalized); ERNIE 4.5 technical
    report (softmax, bias, least sum); SparseMixer-v2, arXiv 2409.12136 (jitter); LFM2, arXiv 2511.23404 (sum_eps, which
    is 1e-6 in the Lfm2MoeTopKRouter of transformers); "sqrtsoftplus": transformers' DeepseekV4TopKRouter.
    """

    compares_entries = False
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}

    bias: Weight | None
    top_k: int
    score: Literal["sigmoid", "softmax", "sqrtsoftplus"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "max"
    renormalize: bool = True
    factor: float = 1.0
    least_sum: float = extension(0.0)
    jitter: float = extension(0.0)
    sum_eps: float = extension(0.0)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = logits.float()
        if self.jitter:
            return _choose_among_near(h, self.top_k, self.jitter)
        score = score_experts(h, self.score)
        choice = score if self.bias is None else score + values(self.bias)  # type: ignore[arg-type]
        if self.groups > 1:
            by_group = choice.view(choice.shape[0], self.groups, -1)
            rank = by_group.topk(2, -1)[0].sum(-1) if self.group_score == "top2" else by_group.amax(-1)
            drop = torch.ones_like(rank, dtype=torch.bool).scatter_(1, rank.topk(self.top_groups, -1)[1], False)
            choice = by_group.masked_fill(drop[..., None], -torch.inf).flatten(1)
        ids = choice.topk(self.top_k, -1)[1]
        weights = score.gather(1, ids)
        if self.renormalize:
            total = weights.sum(-1, keepdim=True).clamp_min(self.least_sum) + self.sum_eps
            weights = weights / (total + NONZERO)
        return weights * self.factor, ids

    def own_extensions(self) -> frozenset[str]:
        """See `Op.own_extensions`; with `SQRT_SOFTPLUS` where it takes these scores."""
        return super().own_extensions() | ({SQRT_SOFTPLUS} if self.score == "sqrtsoftplus" else set())

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """As dense `[T, E]` matrices of weights, so that the order of the chosen experts does not matter."""
        if not isinstance(got, tuple) or len(got) != 2:
            return Comparison(float("inf"), "not (weights, ids)")
        experts = 1 + max(int(got[1].max()), int(want[1].max()))
        if int(got[1].min()) < 0 or got[0].shape != got[1].shape:
            return Comparison(float("inf"), "ids below 0 or of another shape than the weights")
        dense = [torch.zeros(w.shape[0], experts).scatter_add_(1, i.long(), w.float()) for w, i in (got, want)]
        return Comparison(relative_error(*dense), "as a matrix of expert weights")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Routings of the families, V3, V2, Mixtral; V2's with weights divided by their sum; other combinations of
        fields."""
        logits = lambda t, e, mean=0: lambda d: (d.normal(t, e, dtype=torch.float32) + mean,)  # noqa: E731
        v3 = MoERoute(placeholder(16), 4, "sigmoid", 4, 2, "top2", True, 2.5)
        v2 = MoERoute(None, 3, "softmax", 4, 2, "max", False, 16.0)
        mixtral = MoERoute(None, 2, "softmax")
        return [
            Sample("v3", v3, logits(5, 16)),
            Sample("v2", v2, logits(9, 16)),
            Sample("mixtral", mixtral, logits(3, 8)),
            Sample("v2_renormalized", replace(v2, top_k=5, renormalize=True), logits(4, 16)),
            Sample("softmax_factor", replace(mixtral, factor=2.5), logits(6, 8)),
            Sample("softmax_top2", replace(v2, group_score="top2"), logits(33, 16)),
            Sample("softmax_bias", MoERoute(placeholder(16), 3, "softmax", least_sum=1e-12), logits(9, 16)),
            Sample("jitter", MoERoute(None, 2, jitter=0.2), logits(17, 16)),
            Sample("least_sum", MoERoute(placeholder(16), 2, "softmax", least_sum=0.3), logits(17, 16)),
            Sample("sum_eps", MoERoute(placeholder(16), 3, "sigmoid", sum_eps=1e-6), logits(17, 16, -14)),
            Sample("v4", MoERoute(placeholder(16), 4, "sqrtsoftplus", factor=1.5), logits(9, 16)),
            Sample("v4_far", MoERoute(None, 3, "sqrtsoftplus"), logits(9, 16, -30)),
            Sample("both_sums", replace(v2, renormalize=True, least_sum=0.3, sum_eps=0.1), logits(9, 16)),
        ]


def score_experts(logits: torch.Tensor, score: str) -> torch.Tensor:
    """The scores of experts by logits float32 `[T, E]`, as `MoERoute` defines them."""
    if score == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def _choose_among_near(logits: torch.Tensor, top_k: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids `[T, top_k]` of `MoERoute` with `jitter`; logits float32 `[T, E]`."""
    remaining, chosen = logits, []
    for _ in range(top_k):
        best, i = remaining.max(-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        chosen.append((remaining.masked_fill(far, -torch.inf).softmax(-1).gather(1, i), i))
        remaining = remaining.scatter(1, i, -torch.inf)
    weights, ids = zip(*chosen)
    return torch.cat(weights, 1), torch.cat(ids, 1)


class MoEExperts(Op, name="moe_experts", hot=True):
    """The chosen experts' gated MLPs: `y[t] = sum_j weights[t, j] down_e(silu(gate_e(x)) * up_e(x))`, `e = ids[t, j]`.

    With `act` they have no gate: `y[t] = sum_j weights[t, j] down_e(act(up_e(x)))`. With `limit` the activated gate is
    at most that, and the other factor at most that in magnitude; with `limits_input` the gate is limited before it is
    activated.
    Sums in float32, rounded once. Only chosen experts are read; counts stay on the device. With `partial`, an id of -1
    is an expert on another rank and adds nothing. `MoE`, which knows the number of experts per token, counts the cost.

    Args of the call:
        x: `[T, D]`. weights: float32 `[T, k]`. ids: int64 `[T, k]`.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `gate_up` `[E, 2 I, D]` (gate rows first), with `act` `[E, I, D]`, `down` `[E, D, I]`: stacked, read from
    per-expert names; `partial` if other ranks have further experts; `act` a function of `activation`, or "";
    `limit` or None; `limits_input`.

    Source: Mixtral, arXiv 2401.04088; DeepSeekMoE, arXiv 2401.06066; without a gate: Nemotron 3 Nano, arXiv 2512.20848;
    limits: Step 3.7 (transformers' Step3p7TextConfig); before the activation: DeepSeek-V4 (transformers'
    DeepseekV4Experts).
    """

    tolerance = BLOCK
    tunable = True

    gate_up: Weight
    down: Weight
    partial: bool = False
    act: str = extension("")
    limit: float | None = extension(None)
    limits_input: bool = extension(False)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for e in ids.unique().to(HOST).tolist():
            if e < 0:
                continue
            token, j = torch.where(ids == e)
            h = F.linear(x[token].float(), expert_values(self.gate_up, e))
            if self.act:
                h = ACTIVATIONS[self.act](h)
            else:
                gate, up = h.chunk(2, -1)
                h = multiply_gate("silu", gate, up, self.limit, self.limits_input)
            y = F.linear(h, expert_values(self.down, e))
            out.index_add_(0, token, y * weights[token, j, None])
        return out.to(x.dtype)

    def tuning_inputs(self, draw: Draw, rows: int) -> tuple[Any, ...]:
        """See `Op.tuning_inputs`. Each token has 8 experts, or all if there are fewer."""
        count, width = self.gate_up.shape[0], self.gate_up.shape[-1]
        ids = torch.stack([torch.tensor(draw.permutation(count)[:TUNING_EXPERTS]) for _ in range(rows)])
        return draw.normal(rows, width), draw.uniform(*ids.shape, low=0.1), ids.to(draw.device)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token, several; an expert without tokens; each weight format; experts on other ranks; without a gate."""

        def inputs(t: int, k: int, width: int = 64, first: int = 0) -> Any:
            def draw_inputs(d: Draw) -> tuple[Any, ...]:
                ids = torch.stack([torch.tensor(d.permutation(5 + first)[:k]) for _ in range(t)]).to(d.device)
                return d.normal(t, width), d.uniform(t, k, low=0.1), (ids - first).clamp_min(-1)

            return draw_inputs

        def experts(format: str = "plain", inner: int = 48, width: int = 64) -> MoEExperts:
            gate_up, down = (6, 2 * inner, width), (6, width, inner)
            return MoEExperts(placeholder(*gate_up, format=format), placeholder(*down, format=format))

        plain = experts()
        return [
            Sample("t1", plain, inputs(1, 2), "decode"),
            Sample("t13", plain, inputs(13, 3)),
            Sample(
                "one_expert", plain, lambda d: (d.normal(9, 64), d.uniform(9, 1, low=0.1), d.ints(9, 1, below=1) + 4)
            ),
            Sample("fp8_block", experts("fp8_block", 128), inputs(7, 2)),
            Sample("fp8_blocks", experts("fp8_block", 128, 256), inputs(7, 2, 256)),
            *(Sample(f, experts(f, 48, 128), inputs(7, 2, 128)) for f in ("int8_row", "int4_row", "fp8_row")),
            Sample("int8_tiles", experts("int8_row", 64, 128), inputs(7, 2, 128)),
            Sample("int4_group", experts("int4_group", 256, 256), inputs(7, 2, 256)),
            Sample("int8_group", experts("int8_group"), inputs(5, 2)),
            Sample("int4_group32", experts("int4_group32"), inputs(4, 3)),
            Sample("int4_min32", experts("int4_min32"), inputs(4, 3)),
            Sample("mxfp4", experts("mxfp4", 64), inputs(4, 3)),
            Sample("partial_t1", replace(plain, partial=True), inputs(1, 2, first=4), "decode"),
            Sample("partial", replace(plain, partial=True), inputs(9, 3, first=4)),
            Sample("relu2_t1", replace(plain, gate_up=placeholder(6, 48, 64), act="relu2"), inputs(1, 2), "decode"),
            Sample("limit_t1", replace(plain, limit=0.2), inputs(1, 2), "decode"),
            Sample("limit", replace(plain, limit=0.2), inputs(11, 3)),
            Sample("limits_input", replace(plain, limit=0.2, limits_input=True), inputs(11, 3)),
            Sample("relu2", replace(plain, gate_up=placeholder(6, 48, 64), act="relu2"), inputs(11, 3)),
        ]


class MoE(Op, name="moe"):
    """A mixture-of-experts layer: `y = experts(x, route(router(x))) + shared(x)`.

    With `shared_gate` the last term is `sigmoid(shared_gate(x)) * shared(x)`, one factor a token. With `scales_inputs`
    a token's weights are factors on what its experts read, not on what they return: expert e reads `weights[t, j] x`,
    rounded to the dtype of `x`, and their results are added up.

    Experts from `first_identity` on return what they read, and have no weights: the sum of a token's weights of them is
    a factor on x, which each rank adds to the sum over ranks.

    Under expert parallelism the router still chooses among all experts; other ranks compute those that are not `here`,
    and `reduce` sums over the ranks.

    Args of the call:
        x: `[T, D]`.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `router` linear D -> E with a float32 result; `route`; `experts`; `shared` an MLP or None; `reduce`
    sums over ranks; `here` this rank's first expert and its number of experts, None for all; `shared_gate` linear
    D -> 1 with a float32 result, or None; `scales_inputs`; `first_identity` number of an expert, or None.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; gate of the shared expert: Qwen2, arXiv 2407.10671; weights on
    inputs: Llama 4 (Meta, 2025); experts that return what they read: LongCat-Flash, arXiv 2509.01322.
    """

    tolerance = BLOCK
    has_experts = True

    router: Linear
    route: MoERoute
    experts: MoEExperts | ClampedExperts
    shared: GatedMLP | MLP | None = None
    reduce: AllReduce | None = None
    here: tuple[int, int] | None = None
    shared_gate: Linear | None = extension(None)
    scales_inputs: bool = extension(False)
    first_identity: int | None = extension(None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(self.router(x))
        own = None
        if self.first_identity is not None:
            returned = ids >= self.first_identity
            own = x.float() * (weights * returned).sum(-1, keepdim=True)
            ids = torch.where(returned, -1, ids)
        if self.here is not None:
            first, count = self.here
            ids = torch.where((ids >= first) & (ids < first + count), ids - first, -1)
        if self.scales_inputs:  # each token as often as it has experts, one for each
            rows = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            parts = self.experts(rows, torch.ones_like(weights).view(-1, 1), ids.view(-1, 1))
            y = parts.unflatten(0, ids.shape).sum(1)
        else:
            y = self.experts(x, weights, ids)
        if self.shared is not None and self.shared_gate is not None:
            y = y + (self.shared_gate(x).sigmoid() * self.shared(x)).to(y.dtype)
        elif self.shared is not None:
            y = y + self.shared(x)
        y = y if self.reduce is None else self.reduce(y)
        return y if own is None else (y.float() + own).to(y.dtype)

    def cost(self, load: Workload) -> Cost:
        """Router, shared MLP with its gate, and the chosen experts: at most `tokens * top_k` of them are read."""
        others = [op.cost(load) for op in (self.router, self.shared, self.shared_gate) if op is not None]
        return sum(others, cost_of_experts(self.experts, self.route.top_k, load))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a shared expert, its gate, half of the experts; weights on inputs; MLPs without gates;
        experts that return what they read."""

        def layer(shared: bool, partial: bool = False, gate: bool = False) -> MoE:
            count = 4 if partial else 8
            return MoE(
                Linear(placeholder(8, 64), out_dtype=torch.float32),
                MoERoute(placeholder(8), 2, "sigmoid", 4, 2, "top2", True, 2.5),
                MoEExperts(placeholder(count, 64, 64), placeholder(count, 64, 32), partial),
                GatedMLP(Linear(placeholder(64, 64)), Linear(placeholder(64, 32))) if shared else None,
                here=(8 - count, count) if partial else None,
                shared_gate=Linear(placeholder(1, 64), out_dtype=torch.float32) if gate else None,
            )

        plain = replace(
            layer(False),
            experts=MoEExperts(placeholder(8, 48, 64), placeholder(8, 64, 48), act="relu2"),
            shared=MLP.samples()[0].op,  # type: ignore[arg-type]
        )
        # Six experts, and two that return what they read; one of either kind is chosen, by the bias alone.
        decided = Weight((), (8,), torch.float32, make=lambda: torch.arange(8.0).roll(3) * 10)
        returning = replace(
            layer(True),
            route=MoERoute(decided, 4, "softmax", renormalize=False, factor=3.0),
            experts=MoEExperts(placeholder(6, 64, 64), placeholder(6, 64, 32), partial=True),
            first_identity=6,
        )
        scaled = replace(layer(True), route=MoERoute(None, 2, "sigmoid", renormalize=False), scales_inputs=True)
        return [
            Sample("t1", layer(True), lambda d: (d.normal(1, 64),)),
            Sample("t12", layer(False), lambda d: (d.normal(12, 64),)),
            Sample("partial", layer(True, True), lambda d: (d.normal(7, 64),)),
            Sample("gate_t1", layer(True, gate=True), lambda d: (d.normal(1, 64),)),
            Sample("gate_partial", layer(True, True, gate=True), lambda d: (d.normal(9, 64),)),
            Sample("scaled_t1", scaled, lambda d: (d.normal(1, 64),)),
            Sample("scaled_partial", replace(layer(True, True), scales_inputs=True), lambda d: (d.normal(9, 64),)),
            Sample("without_gates", plain, lambda d: (d.normal(11, 64),)),
            Sample("identities_t1", returning, lambda d: (d.normal(1, 64),)),
            Sample("identities", replace(returning, shared=None), lambda d: (d.normal(13, 64),)),
        ]


def cost_of_experts(experts: MoEExperts | ClampedExperts, chosen: int, load: Workload) -> Cost:
    """The cost of the chosen experts: at most `tokens * chosen` of them are read."""
    count = experts.gate_up.shape[0]
    touched = min(count, load.tokens * chosen)
    one = experts.gate_up.nbytes(load.dtype) / count + experts.down.nbytes(load.dtype) / count
    entries = math.prod(experts.gate_up.shape) + math.prod(experts.down.shape)
    return Cost(touched * one, 2.0 * load.tokens * chosen * entries / count)
