"""Routing of a mixture of experts: a token's scores, groups and best experts in one program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import is_dependent, launch_options, wait_then_allow_next


@triton.jit
def _route(
    logits, bias, weights, ids, factor, row,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    TOP2: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, LEAST_SUM: tl.constexpr, SUM_EPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `token` chooses its TOP_K experts, of its TOP_GROUPS best groups where there are groups.

    Experts are held as `[BLOCK_G, BLOCK_E]`, groups by members; of equal scores the first expert wins.
    """
    wait_then_allow_next(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    EACH: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    inside = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    expert = group[:, None] * EACH + member[None, :]
    logit = tl.load(logits + token * row + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.where(inside, tl.exp(logit - tl.max(tl.max(logit, 1), 0)), 0.0)
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        best = tl.max(choice, 1)
        if TOP2:
            first = tl.argmax(choice, 1)
            best += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), 1)
        selected = group < 0
        for _ in range(TOP_GROUPS):
            at = tl.argmax(best, 0)
            selected = selected | (group == at)
            best = tl.where(group == at, float("-inf"), best)
        choice = tl.where(selected[:, None], choice, float("-inf"))
    SIZE: tl.constexpr = BLOCK_G * BLOCK_E
    left, expert_id = tl.reshape(choice, (SIZE,)), tl.reshape(expert, (SIZE,))
    value, place = tl.reshape(score, (SIZE,)), tl.arange(0, SIZE)
    slot = tl.arange(0, BLOCK_K)
    chosen, weight = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for j in range(TOP_K):
        here = place == tl.argmax(left, 0)
        chosen = tl.where(slot == j, tl.sum(tl.where(here, expert_id, 0), 0), chosen)
        weight = tl.where(slot == j, tl.sum(tl.where(here, value, 0.0), 0), weight)
        left = tl.where(here, float("-inf"), left)
    if RENORMALIZE:
        total = tl.sum(weight, 0)
        if LEAST_SUM != 0.0:
            total = tl.maximum(total, LEAST_SUM)
        if SUM_EPS != 0.0:
            total += SUM_EPS
        weight = weight / total
    tl.store(weights + token * TOP_K + slot, weight * factor, mask=slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, chosen.to(tl.int64), mask=slot < TOP_K)


def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `moe_route` by one launch, a program per token."""
    return route_tokens(view, logits, is_dependent(view))


def route_tokens(view: Any, logits: torch.Tensor, ahead: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `moe_route` for other kernels: weights float32 and ids int64 of each token's experts, both `[T, top_k]`.
    `ahead`: launch before the launch in front has ended (`dependent_launch.py`).
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, view.top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, view.top_k, dtype=torch.int64)
    if tokens:
        _route[(tokens,)](
            logits, logits if view.bias is None else view.bias, weights, ids, float(view.factor), logits.stride(0),
            EXPERTS=experts, GROUPS=view.groups, TOP_GROUPS=view.top_groups, TOP_K=view.top_k,
            SIGMOID=view.score == "sigmoid", TOP2=view.group_score == "top2",
            RENORMALIZE=view.renormalize, BIAS=view.bias is not None,
            BLOCK_G=triton.next_power_of_2(view.groups), BLOCK_E=triton.next_power_of_2(experts // view.groups),
            BLOCK_K=triton.next_power_of_2(view.top_k), LEAST_SUM=view.least_sum, SUM_EPS=view.sum_eps, num_warps=1,
            **launch_options(ahead),
        )  # fmt: skip
    return weights, ids
