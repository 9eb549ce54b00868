"""A step's verification and the drafts for the next one as one function of tensors, for layers behind the model.

The model runs over each sequence's last token and its drafts; rows are drawn, drafts judged; the drafting layer runs
over the rows that stand, then once more for each further draft. What the layer reads (tokens, hidden states, positions,
slots, lengths) is chosen on the device from what verification found. No shape and no branch depends on what a tensor
holds, so a device records the whole, and the host reads one table behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import DEVICE_ENTRIES, GREEDY, PLAIN, SHORTLIST_TOKENS, Group, Prepared
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.network import Forward, chain
from inferplane.engine.speculate.verify import Drafted, Verified, judge, needs_probabilities
from inferplane.types import Batch

Model = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
"""`(batch) -> (logits, hidden)` of the model."""


@dataclass(frozen=True)
class Turn:
    """What B sequences bring, T rows each; those that bring fewer have padded rows before their own (`places`).

    Args:
        batch: the rows; logits are wanted of all.
        rows: int64 `[B]`, rows that each brings: its last token and its drafts; 0 for padding, as the next three.
        after_all: int64 `[B]`, drafts to make if all of its drafts stand, or it has none.
        after_some: int64 `[B]`, drafts to make if one is refused.
        room: int64 `[B]`, tokens that it may still bring to the cache behind its last one.
        kind: int64 `[B]`, how its rows are drawn (`rows.GREEDY` and so on).
        seed: int64 `[B]`.
        generated: int64 `[B]`, tokens generated before the step.
        top_k: int64 `[B]`. temperature: float32 `[B]`, above 0. top_p: float32 `[B]`. min_p: float32 `[B]`.
    """

    batch: Batch
    rows: torch.Tensor
    after_all: torch.Tensor
    after_some: torch.Tensor
    room: torch.Tensor
    kind: torch.Tensor
    seed: torch.Tensor
    generated: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True)
class Form:
    """What a cycle is beside its tensors.

    Args:
        drafts: the most that a sequence gets, at least 1.
        kinds: in which ways rows are drawn, rising; each is run for all rows.
    """

    drafts: int
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class Cycle:
    """Verify, then draft.

    Args:
        model: the bound model.
        layer: the drafting layer behind it.
        sampler: of the model.
        config: how drafts are judged.
        block_tokens: tokens a block.
    """

    model: Model
    layer: Forward
    sampler: Sampler
    config: SpeculativeConfig
    block_tokens: int

    def __call__(self, turn: Turn, form: Form) -> torch.Tensor:
        """int64 `[B, 2 + T + form.drafts]`: how many new tokens count; 1 if the logits that decided are finite; the new
        tokens, anything behind those that count; drafts, anything behind those that were wanted.
        """
        logits, hidden = self.model(turn.batch)
        count, tokens = turn.rows.shape[0], turn.batch.max_query_tokens
        place = torch.arange(tokens, device=logits.device)[None]
        nth = place - (tokens - turn.rows)[:, None]
        drawn, p, uniforms = self._draw(logits, turn, form, nth)
        finite = (logits.gather(1, drawn[:, None]).isfinite().view(count, tokens) | (nth < 0)).all(1)
        first = torch.arange(tokens, (count + 1) * tokens, tokens, device=logits.device) - turn.rows.clamp(min=1)
        at = (first[:, None] + place[:, 1:]).clamp(max=count * tokens - 1)
        drafts = Drafted(turn.batch.ids[at], (turn.rows - 1).clamp(min=0), first)
        verified = judge(drawn, drafts, self.config, p, uniforms)
        stood = torch.where(turn.rows > 0, verified.counts, 0)
        wanted = torch.where(stood == turn.rows, turn.after_all, turn.after_some).minimum(turn.room - stood)
        found = self._drafts(turn, form.drafts, Verified(verified.tokens, stood), hidden, wanted)
        return torch.cat((stood[:, None], finite[:, None].long(), verified.tokens, found), 1)

    def _draw(
        self, logits: torch.Tensor, turn: Turn, form: Form, nth: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """A token for each row as plain sampling draws it; where judging needs them, the distributions `[B * T, V]` and
        further random numbers `[B * T, 2]`.
        """
        tokens = nth.shape[1]
        shown = tokens > 1 and needs_probabilities(self.config)
        streams = 0 if form.kinds == (GREEDY,) else 3 if shown else 1
        seeds, positions, numbers = turn.seed, turn.generated, None
        if streams:
            seeds, positions = _each(seeds, tokens), (positions[:, None] + nth).reshape(-1)
            numbers = rng.uniform(seeds, positions, torch.arange(streams, device=logits.device)[:, None])
        drawn: torch.Tensor | None = None
        p: torch.Tensor | None = None
        for kind in form.kinds:
            groups = _groups(kind, turn, tokens, None if numbers is None else numbers[0], logits.shape[1])
            step = Prepared(seeds, positions, groups, None, None, None, None, None, ())
            ids = self.sampler.sample(logits, step)
            mine = _each(turn.kind == kind, tokens) if drawn is not None else None
            drawn = ids if drawn is None or mine is None else torch.where(mine, ids, drawn)
            if streams > 1:
                own = self.sampler.probabilities(logits, step)
                p = own if p is None or mine is None else torch.where(mine[:, None], own, p)
        assert drawn is not None, "a form without kinds"
        return drawn, p, None if numbers is None or streams == 1 else numbers[1:].T

    def _drafts(
        self, turn: Turn, most: int, verified: Verified, hidden: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """int64 `[B, most]`: the layer runs over the rows that stand, moved to the ends of their sequences."""
        batch, stood = turn.batch, verified.counts
        count, tokens = verified.tokens.shape
        start = torch.arange(0, count * tokens, tokens, device=hidden.device)[:, None]
        place = torch.arange(tokens, device=hidden.device)[None]
        refused = turn.rows - stood
        at = (start + (place - refused[:, None]).clamp(min=0)).reshape(-1)
        nth = place - (tokens - stood)[:, None]
        real = (nth >= 0).reshape(-1)
        last = torch.arange(tokens - 1, count * tokens, tokens, device=hidden.device)
        standing = replace(
            batch,
            ids=torch.where(real, verified.tokens.gather(1, nth.clamp(min=0)).reshape(-1), 0),
            positions=torch.where(real, batch.positions[at], 0),
            slots=torch.where(real, batch.slots[at], -1),
            seq_lens=batch.seq_lens - refused.to(batch.seq_lens.dtype),
            logit_rows=last,
        )
        logits, states = self.layer(standing, torch.where(real[:, None], hidden[at], 0))
        found = logits.argmax(-1)
        if most == 1:
            return found[:, None]
        ends = replace(
            standing,
            ids=found,
            positions=standing.positions[last],
            slots=standing.slots[last],
            query_start=torch.arange(count + 1, dtype=torch.int32, device=hidden.device),
            logit_rows=None,
            max_query_tokens=1,
        )
        return chain(self.layer, found, states[last], ends, wanted, most, self.block_tokens)


def _each(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """A sequence's number for each of its rows, `[B * tokens]`."""
    return x[:, None].expand(-1, tokens).reshape(-1)


def _groups(kind: int, turn: Turn, tokens: int, uniform: torch.Tensor | None, vocab: int) -> tuple[Group, ...]:
    """All rows, drawn in one way, no more in a group than a device's kernel takes at once."""
    rows, most = tokens * turn.rows.shape[0], max(1, DEVICE_ENTRIES // vocab)
    parts = [slice(start, min(start + most, rows)) for start in range(0, rows, most)]
    return tuple(_group(kind, turn, tokens, uniform, vocab, part) for part in parts)


def _group(kind: int, turn: Turn, tokens: int, uniform: torch.Tensor | None, vocab: int, part: slice) -> Group:
    temperature, drawn = _each(turn.temperature, tokens)[part], None if uniform is None else uniform[part]
    if kind == GREEDY:
        return Group(kind, part, torch.zeros_like(temperature), None, None, None, None, 0)
    if kind == PLAIN:
        return Group(kind, part, temperature, None, None, None, drawn, 0)
    top_k, top_p, min_p = (_each(x, tokens)[part] for x in (turn.top_k, turn.top_p, turn.min_p))
    return Group(kind, part, temperature, top_k, top_p, min_p, drawn, min(SHORTLIST_TOKENS, vocab))
