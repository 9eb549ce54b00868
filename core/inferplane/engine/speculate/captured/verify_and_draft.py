"""A step, its verification and the drafts for the next step as one function of tensors, for draft layers.

The model runs over each sequence's last token and its drafts; tokens are sampled, drafts verified; the draft layer runs
over the accepted rows, then once more for each further draft. The layer's inputs (tokens, hidden states, positions,
slots, lengths) are selected on the device from the result of the verification. No shape and no branch depends on the
values of a tensor, so a device captures all of it, and the host reads one table at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import (
    DEVICE_ENTRIES,
    GREEDY,
    PLAIN,
    SHORTLIST_TOKENS,
    RowGroup,
    SamplerInputs,
    row_slices,
)
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.network import Forward, draft_tokens
from inferplane.engine.speculate.verify import DraftTable, Verified, needs_probabilities, verify_on_device
from inferplane.types import Batch

Model = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
"""`(batch) -> (logits, hidden)` of the model."""


@dataclass(frozen=True)
class StepTensors:
    """The inputs of B sequences with T rows each; shorter ones have padded rows before their own (`bucket_rows`).

    Args:
        batch: the rows, all with logits.
        rows: int64 `[B]`, real rows of each: its last token and its drafts; 0 for padding, as the next three.
        drafts_if_accepted: int64 `[B]`, drafts to make if all of its drafts are accepted, or it has none.
        drafts_if_rejected: int64 `[B]`, drafts to make if one is rejected.
        max_new_rows: int64 `[B]`, tokens that it may still add to the cache after its last one.
        kind: int64 `[B]`, how its rows are sampled (`batch_rows.GREEDY` and so on).
        seed: int64 `[B]`.
        generated: int64 `[B]`, tokens generated before the step.
        top_k: int64 `[B]`. temperature: float32 `[B]`, above 0. top_p: float32 `[B]`. min_p: float32 `[B]`.
    """

    batch: Batch
    rows: torch.Tensor
    drafts_if_accepted: torch.Tensor
    drafts_if_rejected: torch.Tensor
    max_new_rows: torch.Tensor
    kind: torch.Tensor
    seed: torch.Tensor
    generated: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True)
class CaptureForm:
    """The constants of one capture: steps that differ in them need captures of their own.

    Args:
        drafts: maximum number of drafts that a sequence gets, at least 1.
        kinds: the ways in which rows are sampled, rising; each runs for all rows.
    """

    drafts: int
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class VerifyAndDraft:
    """Run a step, verify its drafts, then draft for the next step.

    Args:
        model: the bound model.
        layer: the draft layer behind it.
        sampler: of the model.
        config: how drafts are verified.
        block_tokens: tokens per block.
    """

    model: Model
    layer: Forward
    sampler: Sampler
    config: SpeculativeConfig
    block_tokens: int

    def __call__(self, inputs: StepTensors, form: CaptureForm) -> torch.Tensor:
        """int64 `[B, 2 + T + form.drafts]`: the number of new tokens; 1 if the logits of the drawn tokens are finite;
        the new tokens, undefined after their number; the drafts, undefined after those that were requested.
        """
        logits, hidden = self.model(inputs.batch)
        count, tokens = inputs.rows.shape[0], inputs.batch.max_query_tokens
        index = torch.arange(tokens, device=logits.device)[None]
        nth = index - (tokens - inputs.rows)[:, None]
        drawn, p, uniforms = self._draw(logits, inputs, form, nth)
        finite = (logits.gather(1, drawn[:, None]).isfinite().view(count, tokens) | (nth < 0)).all(1)
        first = torch.arange(tokens, (count + 1) * tokens, tokens, device=logits.device) - inputs.rows.clamp(min=1)
        at = (first[:, None] + index[:, 1:]).clamp(max=count * tokens - 1)
        drafts = DraftTable(inputs.batch.ids[at], (inputs.rows - 1).clamp(min=0), first)
        verified = verify_on_device(drawn, drafts, self.config, p, uniforms)
        accepted = torch.where(inputs.rows > 0, verified.counts, 0)
        lengths = torch.where(accepted == inputs.rows, inputs.drafts_if_accepted, inputs.drafts_if_rejected)
        lengths = lengths.minimum(inputs.max_new_rows - accepted)
        found = self._drafts(inputs, form.drafts, Verified(verified.tokens, accepted), hidden, lengths)
        return torch.cat((accepted[:, None], finite[:, None].long(), verified.tokens, found), 1)

    def _draw(
        self, logits: torch.Tensor, inputs: StepTensors, form: CaptureForm, nth: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """A token per row as in plain sampling; if verification needs them, the distributions `[B * T, V]` and further
        random numbers `[B * T, 2]`.
        """
        tokens = nth.shape[1]
        with_distributions = tokens > 1 and needs_probabilities(self.config)
        streams = 0 if form.kinds == (GREEDY,) else 3 if with_distributions else 1
        seeds, positions, numbers = inputs.seed, inputs.generated, None
        if streams:
            seeds, positions = _each(seeds, tokens), (positions[:, None] + nth).reshape(-1)
            numbers = rng.uniform(seeds, positions, torch.arange(streams, device=logits.device)[:, None])
        drawn: torch.Tensor | None = None
        p: torch.Tensor | None = None
        for kind in form.kinds:
            groups = _groups(kind, inputs, tokens, None if numbers is None else numbers[0], logits.shape[1])
            step = SamplerInputs(seeds, positions, groups, None, None, None, None, None, ())
            ids = self.sampler.sample(logits, step)
            mine = _each(inputs.kind == kind, tokens) if drawn is not None else None
            drawn = ids if drawn is None or mine is None else torch.where(mine, ids, drawn)
            if streams > 1:
                own = self.sampler.probabilities(logits, step)
                p = own if p is None or mine is None else torch.where(mine[:, None], own, p)
        assert drawn is not None, "a form without kinds"
        return drawn, p, None if numbers is None or streams == 1 else numbers[1:].T

    def _drafts(
        self, inputs: StepTensors, longest: int, verified: Verified, hidden: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """int64 `[B, longest]`, the drafts for the next step: the layer runs over the accepted rows, moved to the end
        of their sequence, then once more for each further draft. `hidden` are the model's, `lengths` `[B]` the drafts
        of each sequence.
        """
        batch, accepted = replace(inputs.batch, more_tables=()), verified.counts  # the layer reads the first table
        count, tokens = verified.tokens.shape
        start = torch.arange(0, count * tokens, tokens, device=hidden.device)[:, None]
        index = torch.arange(tokens, device=hidden.device)[None]
        rejected = inputs.rows - accepted
        at = (start + (index - rejected[:, None]).clamp(min=0)).reshape(-1)
        nth = index - (tokens - accepted)[:, None]
        real = (nth >= 0).reshape(-1)
        last = torch.arange(tokens - 1, count * tokens, tokens, device=hidden.device)
        accepted_rows = replace(
            batch,
            ids=torch.where(real, verified.tokens.gather(1, nth.clamp(min=0)).reshape(-1), 0),
            positions=torch.where(real, batch.positions[at], 0),
            slots=torch.where(real, batch.slots[at], -1),
            seq_lens=batch.seq_lens - rejected.to(batch.seq_lens.dtype),
            logit_rows=last,
        )
        logits, states = self.layer(accepted_rows, torch.where(real[:, None], hidden[at], 0))
        found = logits.argmax(-1)
        if longest == 1:
            return found[:, None]
        last_rows = replace(
            accepted_rows,
            ids=found,
            positions=accepted_rows.positions[last],
            slots=accepted_rows.slots[last],
            query_start=torch.arange(count + 1, dtype=torch.int32, device=hidden.device),
            logit_rows=None,
            max_query_tokens=1,
        )
        return draft_tokens(self.layer, found, states[last], last_rows, lengths, longest, self.block_tokens)


def _each(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """A number per sequence, `x` `[B]`, repeated for each of its `tokens` rows: `[B * tokens]`."""
    return x[:, None].expand(-1, tokens).reshape(-1)


def _groups(
    kind: int, inputs: StepTensors, tokens: int, uniform: torch.Tensor | None, vocab: int
) -> tuple[RowGroup, ...]:
    """All rows as groups that are sampled in the way `kind`, each of as many rows as a device's kernel should process
    at once. `uniform` `[B * tokens]`: their random numbers; None if all are greedy.
    """
    parts = row_slices(tokens * inputs.rows.shape[0], max(1, DEVICE_ENTRIES // vocab))
    return tuple(_group(kind, inputs, tokens, uniform, vocab, part) for part in parts)


def _group(
    kind: int, inputs: StepTensors, tokens: int, uniform: torch.Tensor | None, vocab: int, part: slice
) -> RowGroup:
    """The group of the rows `part` of all rows."""
    temperature, drawn = _each(inputs.temperature, tokens)[part], None if uniform is None else uniform[part]
    if kind == GREEDY:
        return RowGroup(kind, part, torch.zeros_like(temperature), None, None, None, None, 0)
    if kind == PLAIN:
        return RowGroup(kind, part, temperature, None, None, None, drawn, 0)
    top_k, top_p, min_p = (_each(x, tokens)[part] for x in (inputs.top_k, inputs.top_p, inputs.min_p))
    return RowGroup(kind, part, temperature, top_k, top_p, min_p, drawn, min(SHORTLIST_TOKENS, vocab))
