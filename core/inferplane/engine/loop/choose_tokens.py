"""From a step's logits to its sequences' new tokens: sampled, or verified where a sequence has drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from typing import NamedTuple

import torch

from inferplane.engine.request.results import TokenLogprob
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.logprobs import score
from inferplane.engine.sampling.sampler import NOT_FINITE, Sampler
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate import SpeculativeConfig, needs_probabilities, verify
from inferplane.types import HOST
from inferplane.types.batch import Query


class ChosenTokens(NamedTuple):
    """The new tokens of one sequence of a step.

    Args:
        tokens: new tokens; none while its prompt is read.
        logprobs: log-probabilities of the new tokens, if requested.
        prompt_logprobs: log-probabilities of the prompt tokens that the step's rows predict, if requested.
        pooled: the hidden states of its prompt, pooled so far: float32 `[D]` on the host, if requested.
    """

    tokens: list[int]
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    pooled: torch.Tensor | None = None


def choose_tokens(
    chunks: Sequence[ScheduledChunk],
    queries: Sequence[Query],
    logits: torch.Tensor,
    sampler: Sampler,
    config: SpeculativeConfig | None,
    argmax: torch.Tensor | None = None,
) -> list[ChosenTokens]:
    """Choose the new tokens of each sequence of a step, by sampling, or by verification where a sequence has drafts.
    Returns one entry per chunk, in their order; waits for the device.

    Args:
        chunks: the step's sequences.
        queries: of the same sequences, in the same order; they say which rows have logits.
        logits: float32 `[R, V]` of the rows that need them, sequence after sequence.
        sampler: of the model.
        config: how drafts are verified; None without speculation.
        argmax: int64 `[R]`, the token with the largest logit of each row, if the model found it (`ModelOutput`), which
            saves a pass over the logits; None: it is computed here.

    Raises:
        FloatingPointError: the logits of a chosen token hold NaN or infinity.
    """
    if all(c.samples_next and not c.drafts and c.request.next_is_argmax for c in chunks):  # most steps: keep it short
        drawn = sampler.argmax(logits) if argmax is None else argmax
        if not _is_finite(logits, drawn):
            raise FloatingPointError(NOT_FINITE)
        return [ChosenTokens([token]) for token in _to_list(drawn)]
    rows: list[BatchRow] = []
    at: list[int] = []
    prompts: list[Sequence[TokenLogprob | None]] = []
    stop = 0
    for c, q in zip(chunks, queries):
        start, stop = stop, stop + (len(q.ids) if q.logits is None else min(q.logits, len(q.ids)))
        prompts.append(_score_prompt(c, logits[start:stop]) if q.logits is None else ())
        if c.samples_next:
            rows += batch_rows(c)
            at += range(stop - 1 - len(c.drafts), stop)
    if not rows:
        return [ChosenTokens([], (), prompt) for prompt in prompts]
    some = logits if len(at) == logits.shape[0] else logits[torch.tensor(at, device=logits.device)]
    inputs = sampler.prepare(rows)
    drawn = sampler.sample(some, inputs, argmax if some is logits else None)
    # Non-finite logits are the usual sign of a broken kernel; the op `sample` passes them on. Raised for the step, the
    # error then ends only the requests that fail when they run alone.
    if not _is_finite(some, drawn):
        raise FloatingPointError(NOT_FINITE)
    sampled = [c for c in chunks if c.samples_next]
    drafts = [c.drafts for c in sampled]
    if any(drafts):
        assert config is not None
        p = uniforms = None
        if needs_probabilities(config) and any(g.uniform is not None for g in inputs.groups):
            p = sampler.probabilities(some, inputs)
            assert inputs.seeds is not None and inputs.positions is not None, "rows are sampled"
            uniforms = torch.stack([rng.uniform(inputs.seeds, inputs.positions, stream) for stream in (1, 2)], 1)
        verified = verify(drawn, drafts, config, p, uniforms)
        table = torch.cat((verified.counts[:, None], verified.tokens), 1).to(HOST).tolist()
        tokens = [row[:count] for count, *row in table]
    else:
        tokens = [[token] for token in _to_list(drawn)]
    found = None
    if inputs.logprobs is not None:
        padded = [t for new, d in zip(tokens, drafts) for t in (*new, *([0] * (1 + len(d) - len(new))))]
        found = sampler.logprobs(some, torch.tensor(padded, device=some.device), inputs)
    scores = iter(found.to_host(inputs.alternatives)) if found is not None else iter(())
    new_tokens, chosen = iter(tokens), []
    for c, prompt in zip(chunks, prompts):
        new = next(new_tokens) if c.samples_next else []
        has_logprobs = c.samples_next and c.request.params.logprobs is not None
        logprobs = [next(scores) for _ in range(1 + len(c.drafts))] if has_logprobs else []
        chosen.append(ChosenTokens(new, logprobs[: len(new)], prompt))
    return chosen


def _is_finite(logits: torch.Tensor, drawn: torch.Tensor) -> bool:
    """Whether there is a drawn token for each row, and that token's logit is a finite number."""
    if logits.device.type != HOST or logits.dtype is not torch.float32:
        return all(map(math.isfinite, logits.gather(1, drawn.unsqueeze(1)).squeeze(1).to(HOST).tolist()))
    # Avoid torch and NumPy here: after a step their code is no longer in the CPU caches.
    (rows, width), (row_stride, column_stride), first = logits.shape, logits.stride(), logits.data_ptr()
    tokens = _to_list(drawn)
    if len(tokens) != rows or not all(0 <= token < width for token in tokens):
        return False
    addresses = (first + 4 * (i * row_stride + token * column_stride) for i, token in enumerate(tokens))
    return all(math.isfinite(c_float.from_address(at).value) for at in addresses)


def _to_list(tokens: torch.Tensor) -> list[int]:
    """Tokens as integers, copied only from another device: a copy from the host to itself is an operator, too."""
    found: list[int] = (tokens if tokens.device.type == HOST else tokens.to(HOST)).tolist()
    return found


def batch_rows(chunk: ScheduledChunk) -> list[BatchRow]:
    """The rows of a sequence whose next tokens are to be chosen: after its last known token, and after each draft."""
    r, drafts = chunk.request, chunk.drafts
    masks = [None] * (1 + len(drafts)) if r.constraint is None else r.constraint.masks(drafts)
    assert r.seed is not None
    return [
        BatchRow(r.params, r.seed, r.num_chosen + i, r.history, drafts[:i], r.end_ids, mask)
        for i, mask in enumerate(masks)
    ]


def _score_prompt(chunk: ScheduledChunk, logits: torch.Tensor) -> list[TokenLogprob | None]:
    """Log-probabilities of the prompt tokens that the rows of this step predict: row i predicts the token behind it.
    `logits` `[count, V]` are those of the chunk's rows.
    """
    r = chunk.request
    following = r.prompt[r.computed + 1 : r.computed + chunk.count + 1]
    if not following:
        return []
    ids = torch.tensor(following, device=logits.device)
    return list(score(logits[: len(following)], ids, r.params.prompt_logprobs or 0).to_host())


def with_pooled(
    chunks: Sequence[ScheduledChunk], chosen: list[ChosenTokens], hidden: torch.Tensor
) -> list[ChosenTokens]:
    """Add to `chosen`, in place, the pooled hidden states of the prompts of sequences that have `pooling` (embeddings);
    returns the same list.

    Args:
        chunks: the step's sequences.
        chosen: of the same sequences.
        hidden: `[T, D]` of the step's rows.

    Raises:
        FloatingPointError: a pooled vector holds NaN or infinity.
    """
    row = 0
    for i, c in enumerate(chunks):
        if c.request.params.pooling is not None and not c.request.generated:
            chosen[i] = chosen[i]._replace(pooled=_pool(c, hidden[row : row + c.count]))
        row += c.rows
    return chosen


def _pool(chunk: ScheduledChunk, rows: torch.Tensor) -> torch.Tensor:
    """A request's `pooled` after a step, float32 `[D]` on the host, from the hidden states of its rows in the step: the
    last one, or the sum so far, which becomes the mean with the prompt's last chunk.
    """
    r = chunk.request
    if r.params.pooling == "last":
        found = rows[-1].float().to(HOST)
    else:
        found = rows.float().sum(0).to(HOST)
        found = found + r.pooled if r.computed and r.pooled is not None else found
        found = found / len(r.prompt) if chunk.samples_next else found
    if not bool(found.isfinite().all()):
        raise FloatingPointError("the model's hidden states hold NaN or infinity")
    return found
