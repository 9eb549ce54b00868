"""From a step's logits to tokens: all rows in one batch on the device, at the cost of what their parameters need.

Everything here works row by row and adds integers where it adds along the vocabulary (`ops/sampling.py`), so that a
row's token, distribution and log-probabilities do not depend on its batch mates, to the last bit.

The order of processors is that of transformers: repetition penalty, frequency and presence penalties, logit bias, the
ban on end-of-text tokens before min_tokens, the constraint; then temperature, top-k, top-p, min-p, and the bound
`sample` op. One difference: among equal logits at its edge, top-k keeps the lowest ids, exactly k tokens in all, where
transformers keeps all equals.

Source: repetition penalty, arXiv 1909.05858, applied as in transformers to prompt and output alike; frequency and
presence penalties, https://platform.openai.com/docs/api-reference: `logit -= count * frequency + (count > 0) *
presence`, with counts of generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.engine.sampling.batch_rows import (
    GREEDY,
    SHORT,
    BatchRow,
    RowGroup,
    SamplerInputs,
    greedy_inputs,
    max_rows_at_once,
    row_slices,
    sampler_inputs,
)
from inferplane.engine.sampling.logprobs import Logprobs, score
from inferplane.ops.sampling import WEIGHT_BITS, compute_filtered_weights, invert, stable_topk
from inferplane.types import HOST

NOT_FINITE = "the model's logits hold NaN or infinity"


class Sampler:
    """Chooses tokens. Its methods take a step's logits and the `SamplerInputs` that `prepare` made of its rows.

    Args:
        sample: the bound `sample` op.
        vocab: V, columns of the logits.
        device: where the logits are.
        shorten: reduce rows with a small top_k to a short list before calling the op; None: on every device but the
            host, whose kernels do so themselves, row by row.
    """

    def __init__(
        self, sample: Callable[..., torch.Tensor], vocab: int, device: Any, shorten: bool | None = None
    ) -> None:
        self._sample, self.vocab, self.device = sample, vocab, device
        self._shorten = torch.device(device).type != HOST if shorten is None else shorten
        self._minus_infinity = torch.full((), -torch.inf, device=device)
        self._bit_numbers = torch.arange(32, dtype=torch.int32, device=device)
        self._greedy_inputs: dict[int, SamplerInputs] = {}

    def prepare(self, rows: Sequence[BatchRow]) -> SamplerInputs:
        """Gather the parameters of the rows and copy them to the device; once per step, on the host, without waiting
        for the device. If all rows are plain greedy, the result is made once per number of rows and reused.
        """
        if not all(r.is_plain_greedy for r in rows):
            return sampler_inputs(rows, self.vocab, self.device)
        return self._inputs_for_greedy(len(rows))

    def _inputs_for_greedy(self, rows: int) -> SamplerInputs:
        """`greedy_inputs` of this number of rows, made at the first call."""
        found = self._greedy_inputs.get(rows)
        if found is None:
            found = self._greedy_inputs[rows] = greedy_inputs(rows, self.vocab, self.device)
        return found

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row of `logits` `[R, V]`, int64 `[R]`, by the op `sample` at temperature 0."""
        return self.sample(logits, self._inputs_for_greedy(logits.shape[0]))

    def process(self, logits: torch.Tensor, step: SamplerInputs) -> torch.Tensor:
        """Apply penalties, biases, bans of tokens and constraints: returns float32 `[R, V]`, a copy, or `logits` itself
        if no row has any. Forbidden tokens get minus infinity.

        Args:
            logits: float32 `[R, V]`, the model's; they are not changed.
            step: of the same R rows.
        """
        if not (step.penalties or step.bias or step.banned or step.masks):
            return logits
        x = logits.clone()
        if step.penalties is not None:
            rows, ids, counts, repetition, frequency, presence = step.penalties
            own, factor = x[rows, ids], repetition[rows]
            own = torch.where(own < 0, own * factor, own / factor)
            x[rows, ids] = own - (counts * frequency[rows] + (counts > 0) * presence[rows])
        if step.bias is not None:
            rows, ids, bias = step.bias
            x[rows, ids] = x[rows, ids] + bias
        if step.banned is not None:
            x.index_put_(step.banned, self._minus_infinity)
        if step.masks is not None:
            rows, words = step.masks
            allowed = (words[:, :, None] >> self._bit_numbers) & 1
            forbidden = allowed.view(len(rows), -1)[:, : self.vocab] == 0
            x.index_copy_(0, rows, x.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
        return x

    def sample(self, logits: torch.Tensor, step: SamplerInputs, argmax: torch.Tensor | None = None) -> torch.Tensor:
        """Choose one token per row by its own parameters: int64 `[R]`, on the device. The random numbers are those in
        `step`, so equal inputs give equal tokens.

        Args:
            logits: float32 `[R, V]`, the model's; they are not changed.
            step: of the same R rows.
            argmax: int64 `[R]`, the token with the largest of these logits of each row, if the model found it; returned
                without a pass over the logits where all rows are greedy and nothing changes the logits.
        """
        found, logits = logits, self.process(logits, step)
        if argmax is not None and logits is found and len(step.groups) == 1 and step.groups[0].kind == GREEDY:
            return argmax
        if len(step.groups) == 1:  # of all rows
            return self._draw(logits, step.groups[0])
        drawn = [self._draw(logits[group.rows], group) for group in step.groups]
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        for group, ids in zip(step.groups, drawn):
            tokens[group.rows] = ids
        return tokens

    def _draw(self, x: torch.Tensor, group: RowGroup) -> torch.Tensor:
        """Tokens of one group, int64 `[n]`, from its logits `[n, V]`."""
        ids = None
        if group.kind == SHORT and self._shorten:
            x, ids = stable_topk(x, group.candidates)
        drawn = self._sample(x, group.temperature, group.top_k, group.top_p, group.min_p, group.uniform)
        return drawn if ids is None else ids.gather(1, drawn[:, None])[:, 0]

    def probabilities(self, logits: torch.Tensor, step: SamplerInputs) -> torch.Tensor:
        """The distributions that `sample` draws from: float32 `[R, V]`; one-hot for greedy rows.

        Args:
            logits: float32 `[R, V]`, the model's; they are not changed.
            step: of the same R rows.
        """
        logits = self.process(logits, step)
        result = torch.zeros_like(logits)
        for group in step.groups:
            x = logits[group.rows]
            if group.kind == GREEDY:
                result[group.rows] = torch.zeros_like(x).scatter_(1, x.argmax(-1, keepdim=True), 1.0)
                continue
            max_rows = max_rows_at_once(self.vocab, x.device)
            parts = [_distribution(x[at], _rows_of_group(group, at)) for at in row_slices(x.shape[0], max_rows)]
            result[group.rows] = torch.cat(parts)
        return result

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, step: SamplerInputs) -> Logprobs | None:
        """Log-probabilities of the chosen tokens of the rows in `step.logprobs` (those that return some), in this
        order; None when there are none. Each has as many alternatives as the row with the most.

        Args:
            logits: float32 `[R, V]`, the model's.
            tokens: int64 `[R]`: the token chosen at each row, sampled or an accepted draft.
            step: of the same R rows.
        """
        if step.logprobs is None:
            return None
        every = step.logprobs.shape[0] == logits.shape[0]
        some = logits if every else logits.index_select(0, step.logprobs)
        return score(some, tokens.index_select(0, step.logprobs), max(step.alternatives))


def _rows_of_group(group: RowGroup, at: slice) -> RowGroup:
    """The rows `at` of a group as a group of their own, numbered from 0."""
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    values: dict[str, Any] = {name: None if (x := getattr(group, name)) is None else x[at] for name in names}
    return replace(group, rows=slice(None), **values)


def _distribution(x: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """The distribution of each row of a group, float32 `[n, V]`, from their logits `[n, V]`."""
    entries, listed = stable_topk(x, group.candidates) if group.kind == SHORT else (x, None)
    weights, ids = compute_filtered_weights(entries, group.temperature, group.top_k, group.top_p, group.min_p)
    p = weights.float() / weights.sum(-1, keepdim=True).float()
    if ids is None:
        return p
    return torch.zeros_like(x).scatter_(1, ids if listed is None else listed.gather(1, ids), p)


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row from any distribution, by inverting its cumulated sum in the order of ids: int64 `[R]`.

    Args:
        probabilities: float32 `[R, V]` with entries from 0 to 1, of any positive sum.
        uniform: float32 `[R]` in [0, 1).
    """
    return invert((probabilities * 2.0**WEIGHT_BITS).to(torch.int64), uniform)
