"""New tokens of a step that is still in flight: chosen on the device now, read by the host when the step is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferplane.engine.loop.choose_tokens import ChosenTokens, batch_rows
from inferplane.engine.request.results import TokenLogprob
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


def choose_later(
    chunks: Sequence[ScheduledChunk],
    queries: Sequence[Query],
    logits: torch.Tensor,
    sampler: Sampler,
    argmax: torch.Tensor | None = None,
) -> LaterTokens:
    """Choose the new tokens of each sequence of a step without drafts, as `choose_tokens` does, without waiting for the
    device.

    Args:
        chunks: the step's sequences.
        queries: of the same sequences, in the same order.
        logits: float32 `[R, V]` of the rows that need them, sequence after sequence.
        sampler: of the model.
        argmax: int64 `[R]`, the token with the largest logit of each row, if the model found it.
    """
    none = (False,) * len(chunks)
    if all(c.samples_next and c.request.next_is_argmax for c in chunks):
        drawn = sampler.argmax(logits) if argmax is None else argmax
        own = logits.gather(1, drawn[:, None])[:, 0]
        return LaterTokens((True,) * len(chunks), drawn, own, None, none, (), (None,) * len(chunks))
    rows, at, stop = [], [], 0
    prompts: list[Logprobs | None] = []
    for c, q in zip(chunks, queries):
        start, stop = stop, stop + (len(q.ids) if q.logits is None else min(q.logits, len(q.ids)))
        prompts.append(_score_prompt(c, logits[start:stop]) if q.logits is None else None)
        if c.samples_next:
            rows += batch_rows(c)
            at.append(stop - 1)
    samples = tuple(c.samples_next for c in chunks)
    if not rows:
        return LaterTokens(samples, None, None, None, none, (), tuple(prompts))
    some = logits if len(at) == logits.shape[0] else logits[torch.tensor(at).to(logits.device, non_blocking=True)]
    inputs = sampler.prepare(rows)
    drawn = sampler.sample(some, inputs, argmax if some is logits else None)
    own = some.gather(1, drawn[:, None])[:, 0]
    found = sampler.logprobs(some, drawn, inputs)
    scored = tuple(c.samples_next and c.request.params.logprobs is not None for c in chunks)
    return LaterTokens(samples, drawn, own, found, scored, inputs.alternatives, tuple(prompts))


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
