"""New tokens of a step that is still in flight: chosen on the device now, read by the host when the step is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from inferplane.engine.loop.choose_tokens import ChosenTokens
from inferplane.engine.request.results import TokenLogprob
from inferplane.engine.request.state import Request
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.logprobs import Logprobs, score
from inferplane.engine.sampling.sampler import NOT_FINITE, Sampler
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.types.batch import Query

COLUMNS = 5
"""Tensors of `Logprobs`."""


@dataclass(frozen=True)
class LaterTokens:
    """What a step's sequences get, on the device.

    Args:
        samples: for each sequence, whether it gets a token.
        tokens: int64 `[S]` of those that do, in order; None: none does.
        logits: float32 `[S]`, those of the tokens; None without them.
        logprobs: of the tokens of sequences that return some; None: none does.
        with_logprobs: for each sequence, whether it is one of them.
        alternatives: how many alternatives each of them returns.
        prompts: for each sequence, the log-probabilities of the tokens of its prompt behind its rows; None: none.
    """

    samples: tuple[bool, ...]
    tokens: torch.Tensor | None
    logits: torch.Tensor | None
    logprobs: Logprobs | None
    with_logprobs: tuple[bool, ...]
    alternatives: tuple[int, ...]
    prompts: tuple[Logprobs | None, ...]

    def list_tensors(self) -> list[torch.Tensor]:
        """All of them, for `Backend.start_read`; `on_host` takes their copies."""
        found = [t for t in (self.tokens, self.logits) if t is not None]
        for some in (self.logprobs, *self.prompts):
            found += [] if some is None else _columns(some)
        return found

    def on_host(self, copies: Sequence[torch.Tensor]) -> list[ChosenTokens]:
        """The new tokens of each sequence, from the host's copies of `list_tensors`.

        Raises:
            FloatingPointError: the logits of a chosen token hold NaN or infinity.
        """
        rest = list(copies)
        tokens: list[int] = []
        if self.tokens is not None:
            ids, logits = rest.pop(0), rest.pop(0)
            tokens = ids.tolist()
            if len(tokens) != sum(self.samples) or not bool(logits.isfinite().all()):
                raise FloatingPointError(NOT_FINITE)

        def take(some: Logprobs | None, alternatives: Sequence[int] | None = None) -> list[TokenLogprob]:
            if some is None:
                return []
            columns, rest[:COLUMNS] = rest[:COLUMNS], []
            return Logprobs(*columns).to_host(alternatives)

        each, scores = iter(tokens), iter(take(self.logprobs, self.alternatives))
        chosen = []
        for samples, scored, prompt in zip(self.samples, self.with_logprobs, self.prompts):
            new = [next(each)] if samples else []
            chosen.append(ChosenTokens(new, [next(scores)] if scored else (), take(prompt)))
        return chosen


@dataclass(frozen=True)
class LaterChoice:
    """What the tokens of a step are chosen from, as the host knew it when it launched the step. What depends on the
    newest token of a sequence, its constraint's mask and its counts for penalties, is looked up when they are chosen.

    Args:
        samples: for each sequence, whether it gets a token.
        logits: float32 `[S, V]` of those that do, in order; None: none does.
        argmax: int64 `[S]`, the token with the largest logit of each row, if the model found it.
        requests: those that get a token.
        rows: of the same ones; None: each gets the argmax, and nothing else is returned.
        scored: for each sequence, whether the log-probability of its token is returned.
        prompts: see `LaterTokens`.
        needs_newest: whether the tokens of the step before have to be accepted first.
    """

    samples: tuple[bool, ...]
    logits: torch.Tensor | None
    argmax: torch.Tensor | None
    requests: tuple[Request, ...]
    rows: list[BatchRow] | None
    scored: tuple[bool, ...]
    prompts: tuple[Logprobs | None, ...]
    needs_newest: bool

    def choose(self, sampler: Sampler, is_current: Callable[[Request], bool] = lambda request: True) -> LaterTokens:
        """Choose the new tokens as `choose_tokens` does, without waiting for the device.

        Args:
            sampler: of the model.
            is_current: whether a sequence goes on from this step; the tokens of others are not used.
        """
        logits, none = self.logits, (False,) * len(self.samples)
        if logits is None:
            return LaterTokens(self.samples, None, None, None, none, (), self.prompts)
        if self.rows is None:
            drawn = sampler.argmax(logits) if self.argmax is None else self.argmax
            return LaterTokens(self.samples, drawn, _logits_of(logits, drawn), None, none, (), self.prompts)
        rows = [
            row if r.constraint is None or not is_current(r) else replace(row, allowed=r.constraint.masks(())[0])
            for row, r in zip(self.rows, self.requests)
        ]
        inputs = sampler.prepare(rows)
        drawn = sampler.sample(logits, inputs, self.argmax)
        found = sampler.logprobs(logits, drawn, inputs)
        own = _logits_of(logits, drawn)
        return LaterTokens(self.samples, drawn, own, found, self.scored, inputs.alternatives, self.prompts)


def prepare_choice(
    chunks: Sequence[ScheduledChunk],
    queries: Sequence[Query],
    logits: torch.Tensor,
    argmax: torch.Tensor | None = None,
) -> LaterChoice:
    """What the tokens of a step without drafts are chosen from, before its sequences count as computed.

    Args:
        chunks: the step's sequences.
        queries: of the same sequences, in the same order.
        logits: float32 `[R, V]` of the rows that need them, sequence after sequence.
        argmax: int64 `[R]`, the token with the largest logit of each row, if the model found it.
    """
    none = (False,) * len(chunks)
    if all(c.samples_next and c.request.next_is_argmax for c in chunks):
        requests = tuple(c.request for c in chunks)
        return LaterChoice((True,) * len(chunks), logits, argmax, requests, None, none, (None,) * len(chunks), False)
    sampled, at, stop = [], [], 0
    prompts: list[Logprobs | None] = []
    for c, q in zip(chunks, queries):
        start, stop = stop, stop + (len(q.ids) if q.logits is None else min(q.logits, len(q.ids)))
        prompts.append(_score_prompt(c, logits[start:stop]) if q.logits is None else None)
        if c.samples_next:
            sampled.append(c.request)
            at.append(stop - 1)
    samples = tuple(c.samples_next for c in chunks)
    if not sampled:
        return LaterChoice(samples, None, None, (), None, none, tuple(prompts), False)
    if len(at) != logits.shape[0]:
        logits, argmax = logits[torch.tensor(at).to(logits.device, non_blocking=True)], None
    rows = [BatchRow(r.params, _seed_of(r), r.num_chosen, r.history, (), r.end_ids) for r in sampled]
    scored = tuple(c.samples_next and c.request.params.logprobs is not None for c in chunks)
    needs_newest = any(r.pending and r.needs_newest_token for r in sampled)
    return LaterChoice(samples, logits, argmax, tuple(sampled), rows, scored, tuple(prompts), needs_newest)


def _logits_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 `[S]`, the logit of one token of each row."""
    return logits.gather(1, tokens[:, None])[:, 0]


def _seed_of(request: Request) -> int:
    assert request.seed is not None
    return request.seed


def _score_prompt(chunk: ScheduledChunk, logits: torch.Tensor) -> Logprobs | None:
    """Log-probabilities of the prompt tokens that the rows `logits` `[count, V]` predict; None: they predict none."""
    r = chunk.request
    following = r.prompt[r.computed + 1 : r.computed + chunk.count + 1]
    if not following:
        return None
    ids = torch.tensor(following).to(logits.device, non_blocking=True)
    return score(logits[: len(following)], ids, r.params.prompt_logprobs or 0)


def _columns(some: Logprobs) -> list[torch.Tensor]:
    return [some.tokens, some.logprobs, some.ranks, some.top_ids, some.top]
