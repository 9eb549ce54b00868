"""Accepts or rejects drafts, in one ragged pass over the rows of a step, without expanding the batch.

Drafts are single tokens, not samples from a draft distribution: a proposer returns its most likely token. The draft
distribution is then 1 at that token, and speculative sampling becomes: accept with the model's own probability of the
draft, otherwise draw from the model's distribution without it. The result is distributed exactly as without drafts
(Leviathan et al., arXiv 2211.17192, with q one-hot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inferplane.engine.sampling.batch_rows import to_device
from inferplane.engine.sampling.sampler import draw
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.ops.sampling import WEIGHT_BITS


@dataclass(frozen=True)
class Verified:
    """The verification of B sequences.

    Args:
        tokens: int64 `[B, D + 1]`: accepted drafts, then the token drawn after them; the rest is undefined.
        counts: int64 `[B]`, new tokens: accepted drafts + 1.
    """

    tokens: torch.Tensor
    counts: torch.Tensor


def needs_probabilities(config: SpeculativeConfig) -> bool:
    """Whether `verify` has to be given `probabilities` and `uniforms` under this config; otherwise the drawn tokens
    suffice.
    """
    return config.accept_policy == "normal" and config.verify_strategy != "target_match"


def verify(
    drawn: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    config: SpeculativeConfig,
    probabilities: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
) -> Verified:
    """Decide how many drafts of each sequence are accepted, and which token follows them. Runs on the device, and does
    not wait for it.

    Args:
        drawn: int64 `[rows]`: the token that plain sampling draws at each row, which for greedy rows is the argmax.
            Sequence i owns the next `1 + len(drafts[i])` rows.
        drafts: token ids, one list per sequence, possibly empty.
        config: strategy and policy.
        probabilities: float32 `[rows, V]`, the model's distributions after all processors; when `needs_probabilities`.
            Without them a draft is accepted if it is the drawn token, which suffices if all rows are greedy.
        uniforms: float32 `[rows, 2]` in [0, 1), one number for accepting and one for drawing again; when
            `needs_probabilities`. Neither may be the one that `drawn` was drawn with.

    Source: see the module. "target_match" accepts while the draft equals the drawn token: that keeps the distribution
    too, accepts as often, and gives exactly the tokens of plain sampling with the same seed.
    """
    return verify_on_device(drawn, draft_table(drafts, drawn.device), config, probabilities, uniforms)


@dataclass(frozen=True)
class DraftTable:
    """A step's drafts on the device, for B sequences with at most D drafts each.

    Args:
        tokens: int64 `[B, D]`; entries after a sequence's drafts are undefined.
        lengths: int64 `[B]`, number of drafts of each.
        starts: int64 `[B]`, each sequence's first row.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


def draft_table(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftTable:
    """A list of drafts per sequence as a table on the device, copied in one copy, without waiting for it."""
    lengths = np.array([len(d) for d in drafts], np.int64)
    tokens = np.zeros((len(drafts), lengths.max(initial=0)), np.int64)
    for row, d in zip(tokens, drafts):
        row[: len(d)] = d
    return DraftTable(*to_device((tokens, lengths, np.cumsum(1 + lengths) - 1 - lengths), device))


def verify_on_device(
    drawn: torch.Tensor,
    drafts: DraftTable,
    config: SpeculativeConfig,
    probabilities: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
) -> Verified:
    """`verify` for drafts that are on the device already: no shape or branch depends on the values of a tensor, so it
    can be captured.

    Args:
        drawn: int64 `[rows]`, see `verify`, as for the others.
        drafts: of all sequences; the table's `starts` say which rows a sequence owns.
        config: strategy and policy.
        probabilities: of all rows.
        uniforms: of all rows.
    """
    table, length, start = drafts.tokens, drafts.lengths, drafts.starts
    max_drafts = table.shape[1]
    index = torch.arange(max_drafts, device=drawn.device)[None]
    real = index < length[:, None]
    rows = (start[:, None] + index).clamp(max=drawn.shape[0] - 1)
    if config.accept_policy == "accept_all":
        accept = real
    elif config.accept_policy == "reject_all":
        accept = torch.zeros_like(real)
    elif config.verify_strategy == "target_match" or probabilities is None or uniforms is None:
        accept = (drawn[rows] == table) & real
    elif config.verify_strategy == "greedy":
        accept = (probabilities.argmax(-1)[rows] == table) & real
    elif config.verify_strategy == "rejection":
        accept = (uniforms[rows, 0] < probabilities[rows, table]) & real
    else:
        accept = _inside_nucleus(probabilities, rows, table, real, config)
    accepted = accept.long().cumprod(1).sum(1)
    last = start + accepted
    after = drawn[last]
    if max_drafts and probabilities is not None and uniforms is not None and config.verify_strategy == "rejection":
        rejected = accepted < length
        without = probabilities[last].scatter(1, table.gather(1, accepted.clamp(max=max_drafts - 1)[:, None]), 0.0)
        # A draft that had all the probability is rejected only by rounding; the drawn token then counts.
        again = rejected & (without.amax(1) >= 2.0**-WEIGHT_BITS)
        after = torch.where(
            again, draw(torch.where(again[:, None], without, probabilities[last]), uniforms[last, 1]), after
        )
    tokens = torch.cat((table, torch.zeros_like(after)[:, None]), 1).scatter(1, accepted[:, None], after[:, None])
    return Verified(tokens, accepted + 1)


def _inside_nucleus(
    probabilities: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, real: torch.Tensor, config: SpeculativeConfig
) -> torch.Tensor:
    """bool `[B, D]`: whether each draft passes the strategy "topp": it is one of the first `max_candidates` candidates
    with a probability after filtering. The second-best token, if it has one, passes also outside them when each of the
    next `verify_window` drafts is the most likely. Lossy: it ignores how likely a draft is.
    """
    limit = config.max_candidates
    best, ids = probabilities.topk(min(max(2, limit), probabilities.shape[-1]), -1)
    found = (ids[rows] == table[..., None]) & (best[rows] > 0) & real[..., None]
    inside, top = found[..., :limit].any(-1), found[..., 0]
    second = found[..., 1] if found.shape[-1] > 1 else torch.zeros_like(top)
    following = torch.ones_like(top)
    for step in range(1, config.verify_window + 1):
        ahead = torch.zeros_like(top)
        if step < top.shape[1]:
            ahead[:, :-step] = top[:, step:]
        following &= ahead
    return inside | (second & following)
