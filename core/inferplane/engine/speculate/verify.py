"""Accepting or rejecting drafts: one ragged pass over the rows of a step, no batch expansion.

Drafts here are single tokens, not samples from a draft distribution: a proposer gives the token it holds likeliest. The
draft distribution is then one at that token, and speculative sampling becomes: accept with the model's own probability
of the draft, otherwise draw from the model's distribution without it. The result is distributed exactly as without
drafts (Leviathan et al., arXiv 2211.17192, with q one-hot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferplane.engine.speculate.config import SpeculativeConfig


@dataclass(frozen=True)
class Verified:
    """Outcome for B sequences.

    Args:
        tokens: int64 `[B, D + 1]`: accepted drafts, then the token drawn behind them; the rest is undefined.
        counts: int64 `[B]`, tokens that count: accepted drafts + 1.
    """

    tokens: torch.Tensor
    counts: torch.Tensor


def verify(
    probabilities: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    uniforms: torch.Tensor,
    config: SpeculativeConfig,
) -> Verified:
    """Decide how many drafts of each sequence stand, and draw the next token behind them.

    Args:
        probabilities: float32 `[rows, V]`, the model's distribution after all processors; sequence i owns the next
            `1 + len(drafts[i])` rows; greedy rows are one-hot.
        drafts: token ids, one list a sequence, possibly empty.
        uniforms: float32 `[rows, 2]` in [0, 1): one for acceptance, one for drawing, a function of each row's place in
            its sequence only.
        config: strategy and policy.

    Source: see the module; "target_match" draws the model's token at each row and accepts while the draft equals it,
    which also keeps the distribution, and gives the very tokens that plain sampling with the same numbers gives.
    """
    device = probabilities.device
    most = max((len(d) for d in drafts), default=0)
    starts, row = [], 0
    for d in drafts:
        starts.append(row)
        row += 1 + len(d)
    start = torch.tensor(starts, device=device)
    length = torch.tensor([len(d) for d in drafts], device=device)
    table = torch.tensor([[*d, *([0] * (most - len(d)))] for d in drafts], dtype=torch.int64, device=device)
    table = table.view(len(drafts), most)
    place = torch.arange(most, device=device)[None]
    real = place < length[:, None]
    rows = (start[:, None] + place).clamp(max=probabilities.shape[0] - 1)
    drawn = draw(probabilities, uniforms[:, 1])
    if config.accept_policy == "normal":
        accept = _accept(probabilities, rows, table, drawn, uniforms, config) & real
    else:
        accept = real if config.accept_policy == "accept_all" else torch.zeros_like(real)
    accepted = accept.long().cumprod(1).sum(1)
    last = start + accepted
    refused = accepted < length
    behind = drawn[last]
    if most and config.verify_strategy == "rejection" and config.accept_policy == "normal":
        without = probabilities[last]
        token = table.gather(1, accepted.clamp(max=most - 1)[:, None])
        without = torch.where(refused[:, None], without.scatter(1, token, 0.0), without)
        empty = without.sum(1, keepdim=True) <= 0  # the draft had all the probability, lost to rounding
        behind = draw(torch.where(empty, probabilities[last], without), uniforms[last, 1])
    tokens = torch.cat((table, torch.zeros_like(behind)[:, None]), 1).scatter(1, accepted[:, None], behind[:, None])
    return Verified(tokens, accepted + 1)


def _accept(
    p: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    drawn: torch.Tensor,
    uniforms: torch.Tensor,
    config: SpeculativeConfig,
) -> torch.Tensor:
    if config.verify_strategy == "target_match":
        return drawn[rows] == table
    if config.verify_strategy == "greedy":
        return p.argmax(-1)[rows] == table
    chance = p[rows, table]
    if config.verify_strategy == "rejection":
        return uniforms[rows, 0] < chance
    return _inside_nucleus(p, rows, table, config)


def _inside_nucleus(
    p: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, config: SpeculativeConfig
) -> torch.Tensor:
    """The likeliest candidate passes, and so does any of the first few candidates that kept a probability; a draft that
    is second best also passes outside them when the next `window` drafts are each the likeliest. Lossy.
    """
    best, ids = p.topk(min(config.speculate_max_candidate_len, p.shape[-1]), -1)
    inside = ((ids[rows] == table[..., None]) & (best[rows] > 0)).any(-1)
    top = ids[..., 0][rows] == table
    second = (ids[..., 1][rows] == table) if ids.shape[-1] > 1 else torch.zeros_like(top)
    following = torch.ones_like(top)
    for step in range(1, config.speculate_verify_window + 1):
        ahead = torch.zeros_like(top)
        if step < top.shape[1]:
            ahead[:, :-step] = top[:, step:]
        following &= ahead
    return inside | (second & following)


def draw(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row by inverting the cumulative distribution in descending order: int64 `[R]`.

    Args:
        p: `[R, V]`, non-negative, any positive sum a row.
        uniform: `[R]` in [0, 1).
    """
    ordered, ids = p.sort(stable=True, dim=-1, descending=True)
    total = ordered.cumsum(-1)
    chosen = (total > uniform[:, None] * total[:, -1:]).int().argmax(-1, keepdim=True)
    return ids.gather(1, chosen)[:, 0]
