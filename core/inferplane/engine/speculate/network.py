"""What drafting with a network has in common: one forward over the rows that stand, then one for each further draft.

How many drafts each sequence gets, and their blocks, are settled before the first forward; behind it the forwards form
a chain on the device (`chain`), each sequence with one row. The host reads the drafted tokens once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from inferplane.engine.request.state import Request
from inferplane.engine.speculate.network import chain
from inferplane.engine.speculate.proposer import Proposer, Ran
from inferplane.types import FEW_TOKENS, HOST, Batch
from inferplane.types.batch import HostLens, Query, make_batch

Reserve = Callable[[Request, int], bool]
"""`(request, tokens) -> bool`: makes sure that a sequence has blocks for so many tokens."""


@dataclass(frozen=True)
class First:
    """What one sequence brings to the first forward: a query, and the first row of the hidden states to go with it."""

    index: int
    query: Query
    row: int


class ForwardProposer(Proposer):
    """A proposer with a network and a cache in the sequences' own blocks.

    Entries for drafts are written past the end, and overwritten once the real tokens are known.

    Args:
        block_tokens: tokens a block.
        device: torch device of batches.
        reserve: see `Reserve`.
    """

    uses_hidden = True
    """Whether `forward` reads hidden states; otherwise it is handed what there is."""
    own_tokens = 0
    """Tokens past a sequence's computed ones that the first forward writes entries for."""

    def __init__(self, block_tokens: int, device: str, reserve: Reserve) -> None:
        self.block_tokens, self.device, self.reserve = block_tokens, device, reserve

    def first(self, index: int, ran: Ran, want: int) -> First | None:
        """What a sequence brings to the first forward, asking for logits of its last row if it wants drafts."""
        raise NotImplementedError

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[R, V]` and hidden states `[T, D]` of a batch whose rows have hidden states `[T, D]`."""
        raise NotImplementedError

    def complete(self, ended: Sequence[Ran], hidden: torch.Tensor) -> None:
        """See `Proposer.complete`. Only blocks that filled up in this step lack entries that anybody could read."""
        n = self.block_tokens
        filled = [r for r in ended if (r.first + r.rows) // n > r.first // n]
        self._start([f for i, r in enumerate(filled) if (f := self.first(i, r, 0)) is not None], hidden)

    def propose(self, ran: Sequence[Ran], wants: Sequence[int], hidden: torch.Tensor) -> list[list[int]]:
        """See `Proposer.propose`."""
        room = [
            n if n and self.reserve(r.request, r.request.computed + self.own_tokens) else 0 for r, n in zip(ran, wants)
        ]
        brought = [f for i, r in enumerate(ran) if (f := self.first(i, r, room[i])) is not None]
        started = self._start(brought, hidden)
        if started is None:
            return [[] for _ in ran]
        logits, after, ends = started
        going = [i for i in ends if room[i]]
        lengths = self._lengths([ran[i].request for i in going], [room[i] for i in going])
        drafts: list[list[int]] = [[] for _ in ran]
        if going:
            rows = [ends[i] for i in going]
            found = self._chain([ran[i].request for i in going], lengths, rows, logits.argmax(-1), after)
            for i, length, made in zip(going, lengths, found.to(HOST).tolist()):
                drafts[i] = made[:length]
        return drafts

    def _lengths(self, requests: list[Request], wants: list[int]) -> list[int]:
        """How many drafts each gets, blocks for all of them reserved: turn by turn, for as long as there are blocks."""
        lengths = [1] * len(requests)
        for done in range(1, max(wants, default=0)):
            for k, (r, want) in enumerate(zip(requests, wants)):
                if lengths[k] == done < want and self.reserve(r, r.computed + self.own_tokens + done):
                    lengths[k] += 1
        return lengths

    def _chain(
        self, requests: list[Request], lengths: list[int], rows: list[int], tokens: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """All drafts `[sequences, longest]`, from the first ones and the hidden states, whose rows are given."""
        most, ends = max(lengths), [r.computed + self.own_tokens for r in requests]
        if most == 1:
            return tokens[:, None]
        # The rows that the first drafts follow; each forward is the one behind the one before.
        queries = [
            Query([0], end - 1, self.blocks(r.blocks, end + n - 1)) for r, end, n in zip(requests, ends, lengths)
        ]
        batch = make_batch(queries, block_tokens=self.block_tokens, device=self.device)
        batch = replace(batch, max_seq_tokens=max(end + n - 1 for end, n in zip(ends, lengths)))
        starts = tuple(range(len(requests) + 1))
        lens = [
            HostLens(starts, tuple(end + done if done < n else 0 for end, n in zip(ends, lengths)))
            for done in range(1, most)
        ]
        if self.uses_hidden:
            hidden = hidden[torch.tensor(rows, device=hidden.device)]
        wanted = torch.tensor(lengths, device=tokens.device)
        with torch.inference_mode():
            return chain(self.forward, tokens, hidden, batch, wanted, most, self.block_tokens, lens)

    def _start(
        self, brought: list[First], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]] | None:
        """The first forward; also the last row of each sequence, by its index."""
        if not brought:
            return None
        order = sorted(brought, key=lambda f: len(f.query.ids) > FEW_TOKENS)
        batch = make_batch([f.query for f in order], block_tokens=self.block_tokens, device=self.device)
        if self.uses_hidden:
            rows = [f.row + k for f in order for k in range(len(f.query.ids))]
            if rows != list(range(hidden.shape[0])):
                hidden = hidden[torch.tensor(rows, device=hidden.device)]
        logits, after = self._run(batch, hidden)
        ends = accumulate(len(f.query.ids) for f in order)
        return logits, after, {f.index: end - 1 for f, end in zip(order, ends)}

    def blocks(self, blocks: list[int], tokens: int) -> list[int]:
        """Those of a sequence's blocks that `tokens` tokens need."""
        return blocks[: -(-tokens // self.block_tokens)]

    def _run(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return self.forward(batch, hidden)
