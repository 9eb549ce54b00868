"""Routing: scores, groups and the best experts of a token in one program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import asked, begin, how


@triton.jit
def _route(
    logits, bias, weights, ids, factor, row,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    TOP2: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Experts are held as `[BLOCK_G, BLOCK_E]`, groups by members; of equal choices the first expert is taken."""
    begin(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    EACH: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    inside = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    expert = group[:, None] * EACH + member[None, :]
    h = tl.load(logits + token * row + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-h))
    else:
        score = tl.where(inside, tl.exp(h - tl.max(tl.max(h, 1), 0)), 0.0)
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
        kept = group < 0
        for _ in range(TOP_GROUPS):
            at = tl.argmax(best, 0)
            kept = kept | (group == at)
            best = tl.where(group == at, float("-inf"), best)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    SIZE: tl.constexpr = BLOCK_G * BLOCK_E
    left, named = tl.reshape(choice, (SIZE,)), tl.reshape(expert, (SIZE,))
    value, place = tl.reshape(score, (SIZE,)), tl.arange(0, SIZE)
    slot = tl.arange(0, BLOCK_K)
    found, share = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for j in range(TOP_K):
        here = place == tl.argmax(left, 0)
        found = tl.where(slot == j, tl.sum(tl.where(here, named, 0), 0), found)
        share = tl.where(slot == j, tl.sum(tl.where(here, value, 0.0), 0), share)
        left = tl.where(here, float("-inf"), left)
    if RENORMALIZE:
        share = share / tl.sum(share, 0)
    tl.store(weights + token * TOP_K + slot, share * factor, mask=slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, found.to(tl.int64), mask=slot < TOP_K)


def moe_route(p: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a token; ids are those of the op."""
    return routed(p, logits, asked(p))


def routed(p: Any, logits: torch.Tensor, ahead: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The op; `ahead` as in `ahead.py`."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, p.top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, p.top_k, dtype=torch.int64)
    if tokens:
        _route[(tokens,)](
            logits, logits if p.bias is None else p.bias, weights, ids, float(p.factor), logits.stride(0),
            EXPERTS=experts, GROUPS=p.groups, TOP_GROUPS=p.top_groups, TOP_K=p.top_k, SIGMOID=p.score == "sigmoid",
            TOP2=p.group_score == "top2", RENORMALIZE=p.renormalize, BIAS=p.bias is not None,
            BLOCK_G=triton.next_power_of_2(p.groups), BLOCK_E=triton.next_power_of_2(experts // p.groups),
            BLOCK_K=triton.next_power_of_2(p.top_k), num_warps=1, **how(ahead),
        )  # fmt: skip
    return weights, ids
