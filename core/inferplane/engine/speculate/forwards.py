"""What drafting with a network has in common: one forward over the rows that stand, then one for each further draft.

All forwards are ragged: a sequence takes part as long as it wants drafts and has room for them, and brings one row. The
drafted tokens go from one forward to the next on the device; the host reads them once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from inferplane.engine.request import Request
from inferplane.engine.speculate.proposer import Proposer, Ran
from inferplane.types import FEW_TOKENS, HOST, Batch
from inferplane.types.batch import Query, make_batch

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
        rows = [ends[i] for i in going]
        each: list[tuple[list[int], torch.Tensor]] = []
        while going:
            tokens = logits.argmax(-1)
            each.append((going, tokens))
            on = [k for k, i in enumerate(going) if self._goes_on(ran[i].request, len(each), room[i])]
            if not on:
                break
            queries = [self._next(ran[going[k]].request, len(each)) for k in on]
            batch = make_batch(queries, block_tokens=self.block_tokens, device=self.device)
            if len(on) < len(going):
                tokens = tokens[torch.tensor(on, device=tokens.device)]
            if self.uses_hidden:
                after = after[torch.tensor([rows[k] for k in on], device=after.device)]
            logits, after = self._run(replace(batch, ids=tokens), after)
            going, rows = [going[k] for k in on], list(range(len(on)))
        drafts: list[list[int]] = [[] for _ in ran]
        found = iter(torch.cat([t for _, t in each]).to(HOST).tolist() if each else ())
        for members, _ in each:
            for i in members:
                drafts[i].append(next(found))
        return drafts

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

    def _goes_on(self, request: Request, done: int, want: int) -> bool:
        return done < want and self.reserve(request, request.computed + self.own_tokens + done)

    def _next(self, request: Request, done: int) -> Query:
        """The query behind `done` drafts; its token is filled in on the device."""
        before = request.computed + self.own_tokens + done - 1
        return Query([0], before, self.blocks(request.blocks, before + 1), 1)

    def blocks(self, blocks: list[int], tokens: int) -> list[int]:
        """Those of a sequence's blocks that `tokens` tokens need."""
        return blocks[: -(-tokens // self.block_tokens)]

    def _run(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return self.forward(batch, hidden)
