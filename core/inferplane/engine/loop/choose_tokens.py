"""From a step's logits to its sequences' new tokens: sampled, or verified where drafts stand behind the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from typing import NamedTuple

import torch

from inferplane.engine.request.results import TokenLogprob
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import SampleRow
from inferplane.engine.sampling.logprobs import score
from inferplane.engine.sampling.sampler import NOT_FINITE, Sampler
from inferplane.engine.schedule.scheduler import Scheduled
from inferplane.engine.speculate import SpeculativeConfig, needs_probabilities, verify
from inferplane.types import HOST
from inferplane.types.batch import Query


class Decided(NamedTuple):
    """What a step gave its sequences: a list for each.

    Args:
        tokens: new tokens, none while its prompt is read.
        scores: their log-probabilities, where they were asked for.
        prompts: log-probabilities of the prompt tokens that the step's rows predict, where they were asked for.
    """

    tokens: list[list[int]]
    scores: list[list[TokenLogprob]]
    prompts: list[list[TokenLogprob | None]]


def decide(
    chosen: Sequence[Scheduled],
    queries: Sequence[Query],
    logits: torch.Tensor,
    sampler: Sampler,
    config: SpeculativeConfig | None,
    argmax: torch.Tensor | None = None,
) -> Decided:
    """Sample or verify.

    Args:
        chosen: the step's sequences.
        queries: what each brought to the step.
        logits: float32 `[R, V]` of the rows that want them.
        sampler: of the model.
        config: how drafts are verified; None where there are none.
        argmax: int64 `[R]`, the token with the largest logit of each row, if the model found it (`ModelOutput`).

    Raises:
        FloatingPointError: the logits of a row that decides hold NaN or infinity.
    """
    if all(s.last and not s.drafts and s.request.likeliest_next for s in chosen):  # most steps, so in few lines
        drawn = sampler.likeliest(logits) if argmax is None else argmax
        if not _finite(logits, drawn):
            raise FloatingPointError(NOT_FINITE)
        return Decided([[token] for token in _listed(drawn)], [[] for _ in chosen], [[] for _ in chosen])
    rows: list[SampleRow] = []
    at: list[int] = []
    prompts: list[list[TokenLogprob | None]] = []
    first = 0
    for s, q in zip(chosen, queries):
        wanted = len(q.ids) if q.logits is None else min(q.logits, len(q.ids))
        prompts.append(_score_prompt(s, logits[first : first + wanted]) if q.logits is None else [])
        first += wanted
        if s.last:
            rows += _rows(s)
            at += range(first - 1 - len(s.drafts), first)
    if not rows:
        return Decided([[] for _ in chosen], [[] for _ in chosen], prompts)
    some = logits if len(at) == logits.shape[0] else logits[torch.tensor(at, device=logits.device)]
    step = sampler.prepare(rows)
    drawn = sampler.sample(some, step, argmax if some is logits else None)
    # A broken kernel's usual sign, shown by the op `sample`. Raised for the step, it then ends the requests it is
    # in, found one by one.
    if not _finite(some, drawn):
        raise FloatingPointError(NOT_FINITE)
    deciding = [s for s in chosen if s.last]
    drafts = [s.drafts for s in deciding]
    if any(drafts):
        assert config is not None
        p = uniforms = None
        if needs_probabilities(config) and any(g.uniform is not None for g in step.groups):
            p = sampler.probabilities(some, step)
            assert step.seeds is not None and step.positions is not None, "they draw"
            uniforms = torch.stack([rng.uniform(step.seeds, step.positions, stream) for stream in (1, 2)], 1)
        verified = verify(drawn, drafts, config, p, uniforms)
        table = torch.cat((verified.counts[:, None], verified.tokens), 1).to(HOST).tolist()
        kept = [t[:n] for n, *t in table]
    else:
        kept = [[token] for token in _listed(drawn)]
    found = None
    if step.logprobs is not None:
        stood = [t for new, d in zip(kept, drafts) for t in (*new, *([0] * (1 + len(d) - len(new))))]
        found = sampler.logprobs(some, torch.tensor(stood, device=some.device), step)
    listed = iter(found.lists(step.alternatives)) if found is not None else iter(())
    tokens: list[list[int]] = []
    scores: list[list[TokenLogprob]] = []
    by_request = dict(zip((id(s) for s in deciding), kept))
    for s in chosen:
        new = by_request.get(id(s), [])
        tokens.append(new)
        wants = s.last and s.request.params.logprobs is not None
        mine = [next(listed) for _ in range(1 + len(s.drafts))] if wants else []
        scores.append(mine[: len(new)])
    return Decided(tokens, scores, prompts)


def _finite(logits: torch.Tensor, drawn: torch.Tensor) -> bool:
    """Whether the logits of the drawn tokens are numbers, and there is one for each row."""
    if logits.device.type != HOST or logits.dtype is not torch.float32:
        return all(map(math.isfinite, logits.gather(1, drawn.unsqueeze(1)).squeeze(1).to(HOST).tolist()))
    # Without operators of torch or NumPy, whose code no step has left in the caches.
    (rows, width), (to_row, to_column), first = logits.shape, logits.stride(), logits.data_ptr()
    tokens = _listed(drawn)
    if len(tokens) != rows or not all(0 <= token < width for token in tokens):
        return False
    places = (first + 4 * (i * to_row + token * to_column) for i, token in enumerate(tokens))
    return all(math.isfinite(c_float.from_address(at).value) for at in places)


def _listed(tokens: torch.Tensor) -> list[int]:
    """Tokens as integers, copied only from another device: to the host itself that is an operator, too."""
    found: list[int] = (tokens if tokens.device.type == HOST else tokens.to(HOST)).tolist()
    return found


def _rows(s: Scheduled) -> list[SampleRow]:
    r = s.request
    masks = [None] * (1 + len(s.drafts)) if r.constraint is None else r.constraint.masks(s.drafts)
    assert r.seed is not None
    return [
        SampleRow(r.params, r.seed, len(r.generated) + i, r.history, s.drafts[:i], r.end_ids, mask)
        for i, mask in enumerate(masks)
    ]


def _score_prompt(s: Scheduled, logits: torch.Tensor) -> list[TokenLogprob | None]:
    """Log-probabilities of the prompt tokens that this step's rows predict."""
    r = s.request
    following = r.prompt[r.computed + 1 : r.computed + s.count + 1]
    if not following:
        return []
    ids = torch.tensor(following, device=logits.device)
    return list(score(logits[: len(following)], ids, r.params.prompt_logprobs or 0).lists())
