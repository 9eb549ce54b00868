"""One draft after the other, on the device alone.

No shape and no branch depends on what is in a tensor, so a device can record a whole chain. Sequences that want fewer
drafts than the others stay as padding, which all kernels ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from inferplane.types import Batch
from inferplane.types.batch import HostLens

Forward = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`(batch, hidden) -> (logits, hidden)` of whoever drafts."""


def behind(batch: Batch, tokens: torch.Tensor, live: torch.Tensor, block_tokens: int) -> Batch:
    """The batch that continues each sequence by one token; positions, slots and lengths are computed on the device.

    Args:
        batch: one row a sequence, n in all; its block tables reach one token further.
        tokens: int64 `[n]`, the tokens behind its rows.
        live: bool `[n]`; the other sequences become padding.
        block_tokens: tokens a block.
    """
    positions = batch.positions + 1
    place = (positions // block_tokens).clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables.gather(1, place[:, None])[:, 0].long()
    return replace(
        batch,
        ids=tokens,
        positions=positions,
        slots=torch.where(live, blocks * block_tokens + positions % block_tokens, -1),
        seq_lens=torch.where(live, positions + 1, 0).to(batch.seq_lens.dtype),
        host_lens=None,
    )


def chain(
    forward: Forward,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    batch: Batch,
    lengths: torch.Tensor,
    most: int,
    block_tokens: int,
    lens: Sequence[HostLens] = (),
) -> torch.Tensor:
    """The likeliest token behind each one, `most - 1` times: int64 `[n, most]`; behind a sequence's own, anything.

    Args:
        forward: the network that drafts.
        tokens: int64 `[n]`, the first drafts.
        hidden: hidden states `[n, D]` of the rows that they follow.
        batch: these rows, with block tables for all drafts but the last.
        lengths: int64 `[n]`, drafts of each sequence, at most `most`.
        most: of the longest.
        block_tokens: tokens a block.
        lens: lengths in each of the forwards, where the host knows them; kernels that need them read them back if not.
    """
    drafts = [tokens]
    for done in range(1, most):
        batch = behind(batch, tokens, lengths > done, block_tokens)
        known = replace(batch, host_lens=lens[done - 1]) if lens else batch
        logits, hidden = forward(known, hidden)
        tokens = logits.argmax(-1)
        drafts.append(tokens)
    return torch.stack(drafts, 1)
