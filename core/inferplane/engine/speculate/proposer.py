"""Who drafts: the seam between the engine and the ways of guessing ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from inferplane.engine.request import Request
from inferplane.engine.runner import Runner
from inferplane.engine.scheduler import Scheduler
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.ngram import ngram_drafts
from inferplane.errors import UsageError
from inferplane.types import HOST, KVCache
from inferplane.types.batch import FEW_TOKENS, Query, make_batch


@dataclass(frozen=True)
class Ran:
    """What one sequence did in a step that is over.

    Args:
        request: the sequence; its new tokens are in `generated` and `computed` counts the rows that stand.
        first: `computed` before the step: the position of its first row.
        row: its first token row in the step.
        rows: rows that stand: known tokens and accepted drafts.
        drafted: drafts it brought.
        accepted: how many of them stood.
    """

    request: Request
    first: int
    row: int
    rows: int
    drafted: int
    accepted: int


class Proposer(Protocol):
    """Guesses the next tokens of sequences."""

    def propose(self, ran: Sequence[Ran], wants: Sequence[int], hidden: torch.Tensor) -> list[list[int]]:
        """Drafts for each sequence of a step.

        Args:
            ran: every sequence of the step that lives on, also those that want no drafts.
            wants: most drafts of each; 0 for sequences that still prefill.
            hidden: hidden states after the final norm `[rows of the step, D]`.
        """


class NgramProposer:
    """Drafts copied from the prompt or from what was generated; host code only."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.longest = config.speculate_max_ngram_size

    def propose(self, ran: Sequence[Ran], wants: Sequence[int], hidden: torch.Tensor) -> list[list[int]]:
        """See `Proposer.propose`."""
        return [
            ngram_drafts(r.request.prompt, r.request.generated, n, self.longest) if n else []
            for r, n in zip(ran, wants)
        ]


class MTPProposer:
    """The model's own multi-token-prediction layer, run on the rows that stand, then once more a further draft.

    Its cache uses the blocks of the sequence itself: entry i belongs to token i's hidden state and token i + 1. Entries
    for drafts are written past the end and overwritten once the real tokens are known. Further drafts feed the layer's
    own hidden state back to it.

    After a prefix hit the last entry of the shared blocks was made with the token that followed in another sequence.
    That can cost an accepted draft, never a right token: drafts are verified.

    Args:
        layers: the bound `mtp_layer` for each step kind.
        cache: the model's cache.
        index: place of the layer's own cache in it.
        device: torch device of batches.
        reserve: `(request, tokens) -> bool`, makes sure that a sequence has blocks for so many tokens.
    """

    def __init__(
        self,
        layers: Mapping[str, Callable[..., Any]],
        cache: KVCache,
        index: int,
        device: str,
        reserve: Callable[[Request, int], bool],
    ) -> None:
        self.layers, self.kv, self.block_tokens, self.device = layers, cache.layers[index], cache.block_tokens, device
        self.reserve = reserve

    def propose(self, ran: Sequence[Ran], wants: Sequence[int], hidden: torch.Tensor) -> list[list[int]]:
        """See `Proposer.propose`."""
        drafts: list[list[int]] = [[] for _ in ran]
        order = sorted(range(len(ran)), key=lambda i: ran[i].rows > FEW_TOKENS)
        if not order:
            return drafts
        queries, states = [], []
        for i in order:
            r = ran[i]
            ids = r.request.slice(r.first + 1, r.first + r.rows + 1)
            queries.append(Query(ids, r.first, self._blocks(r.request, r.first + r.rows), 1 if wants[i] else 0))
            states.append(hidden[r.row : r.row + r.rows])
        logits, after = self._run(torch.cat(states), queries)
        ends = list(accumulate(len(q.ids) for q in queries))
        going = [(i, end - 1) for i, end in zip(order, ends) if wants[i]]
        while going:
            tokens = [int(t) for t in logits.argmax(-1).to(HOST).tolist()]
            again, rows, queries = [], [], []
            for (i, row), token in zip(going, tokens):
                drafts[i].append(token)
                request, n = ran[i].request, len(drafts[i])
                if n < wants[i] and self.reserve(request, request.computed + n):
                    again.append(i)
                    rows.append(row)
                    before = request.computed + n - 1
                    queries.append(Query([token], before, self._blocks(request, before + 1), 1))
            if not again:
                break
            logits, after = self._run(after[torch.tensor(rows, device=after.device)], queries)
            going = [(i, k) for k, i in enumerate(again)]
        return drafts

    def _blocks(self, request: Request, tokens: int) -> list[int]:
        return request.blocks[: -(-tokens // self.block_tokens)]

    def _run(self, hidden: torch.Tensor, queries: list[Query]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = make_batch(queries, block_tokens=self.block_tokens, device=self.device)
        with torch.inference_mode():
            logits, states = self.layers[batch.kind](hidden, batch, self.kv)
        return logits, states


class AdaptiveLength:
    """How many drafts to ask for: two more after all were accepted, one fewer after a rejection, at least one."""

    def __init__(self, most: int, adaptive: bool) -> None:
        self.most, self.adaptive = most, adaptive
        self._length: dict[int | str, int] = {}

    def length(self, request: Request) -> int:
        """Drafts to ask for now."""
        return self._length.get(request.request_id, self.most)

    def tell(self, request: Request, drafted: int, accepted: int) -> None:
        """Take in the outcome of a verification."""
        if self.adaptive and drafted:
            now = self.length(request)
            self._length[request.request_id] = min(self.most, now + 2) if accepted == drafted else max(1, now - 1)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._length.pop(request.request_id, None)


class Speculator:
    """Asks a proposer for drafts after each step, and hands them to the sequences.

    Args:
        config: the method and its limits.
        runner: the bound model.
        scheduler: gives blocks for drafts; drafts never push a sequence out.

    Raises:
        UsageError: the method needs what the model lacks.
    """

    def __init__(self, config: SpeculativeConfig, runner: Runner, scheduler: Scheduler) -> None:
        self.config = config
        self.lengths = AdaptiveLength(config.speculate_max_draft_token_num, config.adaptive)
        self.proposer: Proposer
        if config.speculate_method == "mtp":
            if not runner.model.mtp:
                raise UsageError(
                    f"speculate_method='mtp', but {runner.files.name} has no multi-token-prediction layer.",
                    there_is="'inference_with_reference', which needs none",
                    remedy="load a checkpoint that has one",
                )
            assert runner.cache is not None
            layers: dict[str, Any] = {}
            for kind, step in runner.steps.items():
                layers[kind] = step.__self__.mtp[0]  # type: ignore[attr-defined]
            self.proposer = MTPProposer(
                layers, runner.cache, len(runner.model.layers), runner.backend.torch_device_indexed, scheduler.extend
            )
        else:
            self.proposer = NgramProposer(config)

    def propose(self, ran: Sequence[Ran], hidden: torch.Tensor) -> None:
        """Put drafts for the next step on the sequences that live on and decode."""
        alive = [r for r in ran if r.request.finish_reason is None and r.request.blocks]
        for r in alive:
            self.lengths.tell(r.request, r.drafted, r.accepted)
        wants = [
            min(self.lengths.length(r.request), r.request.most_tokens - r.request.tokens)
            if r.request.remaining == 1
            else 0
            for r in alive
        ]
        for r, drafts in zip(alive, self.proposer.propose(alive, wants, hidden)):
            r.request.drafts = drafts

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.lengths.forget(request)
