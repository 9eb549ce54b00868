"""Drafting with a network: a layer behind the model (MTP, EAGLE), or a smaller model of the same vocabulary.

It runs one forward over the accepted rows, then one for each further draft. How many drafts each sequence gets, and
their blocks, are decided before the first forward. The further forwards follow each other on the device
(`draft_tokens`), with one row per sequence. The host reads the drafted tokens once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from inferplane.engine.request.state import Request
from inferplane.engine.runner.capture import DecodeSteps, why_not_captured
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.runner.ranks import DraftCall
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate.proposer import Proposer, VerifiedChunk
from inferplane.types import FEW_TOKENS, HOST, Batch
from inferplane.types.batch import HostLens, Query, make_batch

Reserve = Callable[[Request, int], bool]
"""`(request, tokens) -> bool`: gives a sequence blocks for `tokens` tokens, if there are enough."""
MOST_MISSING = 1024
"""Tokens that a draft model reads once more to draft again; sequences that lack more go on without drafts."""
Forward = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`(batch, hidden) -> (logits, hidden)` of the network that drafts."""


@dataclass(frozen=True)
class ForwardInput:
    """The input of one sequence to the first forward: a query, and the first row of the hidden states for it."""

    index: int
    query: Query
    row: int


class NetworkProposer(Proposer):
    """A proposer with a network and a cache in the sequences' own blocks.

    Entries for drafts are written past the end, and overwritten when the real tokens are known.

    Args:
        block_tokens: tokens per block.
        device: torch device of batches.
        reserve: see `Reserve`.
    """

    trial_tokens = 32
    uses_hidden = True
    """Whether `forward` reads hidden states; otherwise they may be those of other rows."""
    waits_for_tokens = False
    """Whether the host reads each draft before the next forward."""
    own_tokens = 0
    """Tokens past a sequence's computed ones that the first forward writes entries for."""

    def __init__(self, block_tokens: int, device: str, reserve: Reserve) -> None:
        self.block_tokens, self.device, self.reserve = block_tokens, device, reserve
        self.missing: dict[int | str, int] = {}
        """First token of a sequence without entries, by request: none are written of one that decodes in a pause."""

    def first_input(self, index: int, chunk: VerifiedChunk, max_drafts: int) -> ForwardInput | None:
        """The input of one sequence to the first forward, which writes the entries that are still missing; None: none
        is.

        Args:
            index: of the sequence in the step, to be returned in the input.
            chunk: what the sequence did in the step.
            max_drafts: maximum number of drafts; above 0 the input's last row gets logits, for the first draft.
        """
        raise NotImplementedError

    def needs_step(self, chunks: Sequence[ScheduledChunk], max_drafts: Sequence[int]) -> bool:
        """See `Proposer.needs_step`: unless the step leaves nothing but gaps, while drafting is paused."""
        return not all(self.skips(chunk, most) for chunk, most in zip(chunks, max_drafts))

    def skips(self, chunk: VerifiedChunk | ScheduledChunk, max_drafts: int) -> bool:
        """Whether the entries of a chunk are left out: its sequence decodes, or ends, while drafting is paused."""
        return self.is_paused and not max_drafts and chunk.rows <= FEW_TOKENS and bool(chunk.request.generated)

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
        self.missing.pop(request.request_id, None)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the network over a batch, writing its entries into the network's cache: logits `[R, V]` of the rows that
        need them, and hidden states `[T, D]`. `hidden` `[T, D]` are the hidden states that belong to the rows.
        """
        raise NotImplementedError

    def complete(self, ended: Sequence[VerifiedChunk], hidden: torch.Tensor) -> None:
        """See `Proposer.complete`. Only blocks that became full in this step lack entries that could be read."""
        n = self.block_tokens
        filled = [c for c in ended if (c.first + c.rows) // n > c.first // n and not self.skips(c, 0)]
        self._first_forward(filled, [0] * len(filled), hidden)

    def propose(
        self, chunks: Sequence[VerifiedChunk], max_drafts: Sequence[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        """See `Proposer.propose`. Reserves blocks for the drafts, never by preemption: with too few free blocks,
        sequences get fewer drafts or none. Waits for the device once, at the end.
        """
        limits = [
            n if n and self.reserve(c.request, c.request.computed + self.own_tokens) else 0
            for c, n in zip(chunks, max_drafts)
        ]
        first = self._first_forward(chunks, limits, hidden)
        if first is None:
            return [[] for _ in chunks]
        logits, hidden, last_rows = first
        drafting = [i for i in last_rows if limits[i]]
        requests = [chunks[i].request for i in drafting]
        lengths = self._reserve_drafts(requests, [limits[i] for i in drafting])
        drafts: list[list[int]] = [[] for _ in chunks]
        if drafting:
            rows = [last_rows[i] for i in drafting]
            found = self._draft(requests, lengths, rows, logits.argmax(-1), hidden)
            for i, length, tokens in zip(drafting, lengths, found.to(HOST).tolist()):
                drafts[i] = tokens[:length]
        return drafts

    def _reserve_drafts(self, requests: list[Request], limits: list[int]) -> list[int]:
        """Reserve blocks for up to `limits` drafts of each sequence, one more draft per sequence and round, while there
        are blocks; returns how many drafts each sequence gets, at least 1.
        """
        lengths = [1] * len(requests)
        for done in range(1, max(limits, default=0)):
            for k, (r, limit) in enumerate(zip(requests, limits)):
                if lengths[k] == done < limit and self.reserve(r, r.computed + self.own_tokens + done):
                    lengths[k] += 1
        return lengths

    def _draft(
        self, requests: list[Request], lengths: list[int], rows: list[int], tokens: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """All drafts of the sequences that get some, int64 `[sequences, longest]`.

        Args:
            requests: the sequences.
            lengths: drafts of each; further entries of its row are undefined.
            rows: the row of each in `hidden`, the last of its first forward.
            tokens: int64 `[sequences]`, the first draft of each.
            hidden: `[T, D]`, hidden states of the first forward.
        """
        longest, positions = max(lengths), [r.computed + self.own_tokens for r in requests]
        if longest == 1:
            return tokens[:, None]
        if self.waits_for_tokens:
            return self._draft_one_by_one(requests, lengths, rows, tokens, hidden)
        # Rows preceding each first draft; every later forward advances them by one token.
        queries = [
            Query([0], end - 1, self.blocks(r.blocks, end + n - 1)) for r, end, n in zip(requests, positions, lengths)
        ]
        batch = make_batch(queries, block_tokens=self.block_tokens, device=self.device)
        batch = replace(batch, max_seq_tokens=max(end + n - 1 for end, n in zip(positions, lengths)))
        starts = tuple(range(len(requests) + 1))
        lens = [
            HostLens(starts, tuple(end + done if done < n else 0 for end, n in zip(positions, lengths)))
            for done in range(1, longest)
        ]
        if self.uses_hidden:
            hidden = self.select(hidden, rows, continues=True)
        counts = torch.tensor(lengths, device=tokens.device)
        with torch.inference_mode():
            return draft_tokens(self.forward, tokens, hidden, batch, counts, longest, self.block_tokens, lens)

    def _draft_one_by_one(
        self, requests: list[Request], lengths: list[int], rows: list[int], tokens: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """As `_draft`, but the host reads each draft before the next forward, which has rows of those sequences alone
        that get a further draft.
        """
        drafts, row_of = torch.zeros(len(requests), max(lengths), dtype=torch.int64), dict(enumerate(rows))
        drafts[:, 0] = tokens
        for done in range(1, max(lengths)):
            live = [k for k, length in enumerate(lengths) if length > done]
            stops = [requests[k].computed + self.own_tokens + done for k in live]
            queries = [
                Query([int(drafts[k, done - 1])], end - 1, self.blocks(requests[k].blocks, end))
                for k, end in zip(live, stops)
            ]
            batch = make_batch(queries, block_tokens=self.block_tokens, device=self.device)
            with torch.inference_mode():
                hidden = self.select(hidden, [row_of[k] for k in live], continues=True)
                logits, hidden = self.forward(batch, hidden)
            drafts[live, done] = logits.argmax(-1).to(HOST)
            row_of = {k: row for row, k in enumerate(live)}
        return drafts

    def select(self, hidden: torch.Tensor, rows: list[int], *, continues: bool) -> torch.Tensor:
        """Rows of hidden states for the next forward.

        Args:
            hidden: `[T, D]`.
            rows: indices into it.
            continues: whether `hidden` are those of the last forward; else the model's.
        """
        if rows == list(range(hidden.shape[0])):
            return hidden
        return hidden[torch.tensor(rows, device=hidden.device)]

    def _first_forward(
        self, chunks: Sequence[VerifiedChunk], limits: Sequence[int], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]] | None:
        """Run the first forward over all inputs of the sequences at once; returns logits, hidden states, and the last
        row of each sequence, by its index. None without inputs. `limits` are the maximum numbers of drafts; `hidden`
        `[rows of the step, D]` are the model's.
        """
        inputs = [f for i, c in enumerate(chunks) if (f := self.first_input(i, c, limits[i])) is not None]
        if not inputs:
            return None
        order = sorted(inputs, key=lambda f: len(f.query.ids) > FEW_TOKENS)
        batch = make_batch([f.query for f in order], block_tokens=self.block_tokens, device=self.device)
        if self.uses_hidden:
            rows = [f.row + k for f in order for k in range(len(f.query.ids))]
            hidden = self.select(hidden, rows, continues=False)
        with torch.inference_mode():
            logits, hidden = self.forward(batch, hidden)
        stops = accumulate(len(f.query.ids) for f in order)
        return logits, hidden, {f.index: stop - 1 for f, stop in zip(order, stops)}

    def blocks(self, blocks: list[int], tokens: int) -> list[int]:
        """The first ceil(`tokens` / block_tokens) entries of a sequence's list of block ids, which hold its first
        `tokens` tokens; all of them if there are fewer. Nothing is allocated.
        """
        return blocks[: -(-tokens // self.block_tokens)]


class DraftLayerProposer(NetworkProposer):
    """A draft layer behind the model: its multi-token-prediction layer, or an EAGLE head.

    Entry i of the layer's cache belongs to token i's hidden state and token i + 1, and lies in the sequence's own
    blocks. The layer runs on the accepted rows, then once more for each further draft, on its own hidden states.

    So the entries of a block depend on its tokens and on the token after them. While such a layer drafts, the hash of a
    block covers both (`Scheduler`'s `lookahead`), so a prefix hit finds exactly the entries that the sequence would
    have written itself, up to the block's end: no hidden state from before is needed. Only blocks that were filled
    while drafting was paused lack entries: drafts after them are accepted less often.

    Args:
        runner: the model, bound and loaded. Steps of the layer are captured in the sizes of the model's own steps.
        index: of the draft layer (`Runner.draft_layer`).
        reserve: see `Reserve`.
    """

    def __init__(self, runner: Runner, index: int, reserve: Reserve) -> None:
        cache, decode = runner.cache, runner.decode
        assert cache is not None and decode is not None, "the runner was not opened"
        super().__init__(cache.block_tokens, runner.backend.torch_device_indexed, reserve)
        layers = runner.draft_layer(index)
        self.index, self.ranks, self.waits_for_tokens = index, runner.ranks, runner.ranks is not None
        self.call: DraftCall | None = None
        self.kv = kv = runner.draft_cache(index)
        self.layer: Forward = lambda batch, hidden: layers[batch.kind](hidden, batch, kv)
        reason = why_not_captured(runner.plan, runner.options, "mtp")
        limit, vocab, report = runner.max_model_len, runner.model.vocab, runner.report_wrong_capture
        self.steps = DecodeSteps(runner.backend, self.layer, cache, limit, decode.sizes, reason, vocab, report)

    def first_input(self, index: int, chunk: VerifiedChunk, max_drafts: int) -> ForwardInput | None:
        """All accepted rows of the sequence, with the token after each: the layer's entries for them were computed from
        drafted hidden states, or not at all. None for one that decodes in a pause; it gets no drafts any more, since
        the layer would need hidden states that are gone. `index` and `max_drafts`: see `NetworkProposer.first_input`.
        """
        request = chunk.request
        if self.missing.get(request.request_id, chunk.first) < chunk.first:
            return None  # the hidden states of what lacks entries are not known any more
        if self.skips(chunk, max_drafts):
            self.missing[request.request_id] = chunk.first
            return None
        self.missing.pop(request.request_id, None)
        ids = request.slice(chunk.first + 1, chunk.first + chunk.rows + 1)
        blocks = self.blocks(chunk.blocks, chunk.first + chunk.rows)
        return ForwardInput(index, Query(ids, chunk.first, blocks, 1 if max_drafts else 0), chunk.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NetworkProposer.forward`: the draft layer, captured where possible; with several ranks, on all of
        them.
        """
        if self.ranks is None:
            return self.steps(batch, hidden)
        with self.ranks.step(batch, self.block_tokens, self.call):
            return self.steps(batch, hidden)

    def select(self, hidden: torch.Tensor, rows: list[int], *, continues: bool) -> torch.Tensor:
        """See `NetworkProposer.select`; the other ranks select the same rows of their own."""
        self.call = DraftCall(self.index, continues, tuple(rows))
        return super().select(hidden, rows, continues=continues)


class DraftModelProposer(NetworkProposer):
    """A draft model with a plan, weights and a cache of its own.

    Its cache has as many blocks of the same size as the target's, and both use a sequence's block table. So a block
    that is found again by its content holds the draft model's entries too, unless it was filled while drafting was
    paused, and preemption frees them with the others.

    Each step it runs on the tokens that have no entries yet: the newest token, and the tokens of the last step except
    for accepted drafts, on which it ran when it made them.

    Args:
        runner: the draft model, bound and loaded.
        reserve: see `Reserve`.
    """

    uses_hidden = False
    own_tokens = 1  # the newest token, which the target reads in the next step

    def __init__(self, runner: Runner, reserve: Reserve) -> None:
        assert runner.cache is not None, "the runner was not opened"
        super().__init__(runner.cache.block_tokens, runner.backend.torch_device_indexed, reserve)
        self.runner = runner

    def first_input(self, index: int, chunk: VerifiedChunk, max_drafts: int) -> ForwardInput | None:
        """The known tokens of the sequence that have no entries in the draft model's cache, and the newest token too if
        there are to be drafts; None if that is no token. See `NetworkProposer.first_input`.
        """
        stop = chunk.first + chunk.rows + (1 if max_drafts else 0)
        # It ran on the token before the drafts and on all drafts but the last; the accepted ones have right entries.
        start = chunk.first + (1 + min(chunk.num_accepted, chunk.num_drafts - 1) if chunk.num_drafts else 0)
        request = chunk.request
        start = min(start, self.missing.get(request.request_id, start))
        if self.skips(chunk, max_drafts):
            self.missing[request.request_id] = start
            return None
        if start >= stop:
            return None
        if chunk.first - start > MOST_MISSING:
            self.missing[request.request_id] = start
            return None
        self.missing.pop(request.request_id, None)
        query = Query(request.slice(start, stop), start, self.blocks(chunk.blocks, stop), 1 if max_drafts else 0)
        return ForwardInput(index, query, chunk.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NetworkProposer.forward`: a step of the draft model. The target's `hidden` states are not read."""
        return self.runner.run(batch)


def next_token_batch(batch: Batch, tokens: torch.Tensor, live: torch.Tensor, block_tokens: int) -> Batch:
    """The batch of the next forward, which continues each sequence by one token; positions, slots and lengths are
    computed on the device, without waiting for it. The given batch does not change.

    Args:
        batch: one row per sequence, n in all; its block tables reach one token further.
        tokens: int64 `[n]`, the tokens after its rows.
        live: bool `[n]`; the other sequences become padding.
        block_tokens: tokens per block.
    """
    positions = batch.positions + 1
    index = (positions // block_tokens).clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables.gather(1, index[:, None])[:, 0].long()
    return replace(
        batch,
        ids=tokens,
        positions=positions,
        slots=torch.where(live, blocks * block_tokens + positions % block_tokens, -1),
        seq_lens=torch.where(live, positions + 1, 0).to(batch.seq_lens.dtype),
        host_lens=None,
    )


def draft_tokens(
    forward: Forward,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    batch: Batch,
    lengths: torch.Tensor,
    longest: int,
    block_tokens: int,
    lens: Sequence[HostLens] = (),
) -> torch.Tensor:
    """Draft `longest - 1` further tokens, each the argmax after the one before: int64 `[n, longest]`.

    It runs on the device alone: no shape and no branch depends on the values of a tensor, so it can be captured.
    Sequences with fewer drafts than others stay as padding, which all kernels ignore; their further entries are
    undefined.

    Args:
        forward: the network that drafts.
        tokens: int64 `[n]`, the first drafts.
        hidden: hidden states `[n, D]` of the rows before them.
        batch: these rows, with block tables for all drafts but the last.
        lengths: int64 `[n]`, drafts of each sequence, at most `longest`.
        longest: the largest number of drafts.
        block_tokens: tokens per block.
        lens: lengths in each of the forwards, if the host knows them; otherwise kernels that need them read them back.
    """
    drafts = [tokens]
    for done in range(1, longest):
        batch = next_token_batch(batch, tokens, lengths > done, block_tokens)
        known = replace(batch, host_lens=lens[done - 1]) if lens else batch
        logits, hidden = forward(known, hidden)
        tokens = logits.argmax(-1)
        drafts.append(tokens)
    return torch.stack(drafts, 1)
