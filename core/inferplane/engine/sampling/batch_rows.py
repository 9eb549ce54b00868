"""The rows of logits of a step, and their sampling parameters as tensors, copied to the device at once.

A row is a position of a sequence whose next token is to be chosen. A sequence has one row per step, or several when
drafts are verified; each row then knows the drafts before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferplane.engine.request.history import History
from inferplane.engine.request.params import MAX_GREEDY_TEMPERATURE, SamplingParams
from inferplane.engine.sampling import rng
from inferplane.types import HOST

SHORTLIST_TOKENS = 1024
"""Rows with a top_k up to this are reduced to their most likely tokens before anything is sorted."""
HOST_ENTRIES, DEVICE_ENTRIES = 2**18, 2**24
"""Logits that torch processes at once: on the host what fits a core's cache, elsewhere what fills any device."""

GREEDY, PLAIN, SHORT, FULL = range(4)
"""How a row is sampled: the argmax; from all tokens; from a short list; from all tokens, sorted."""


def max_rows_at_once(vocab: int, device: Any) -> int:
    """How many rows of `vocab` logits torch should process at once on a device, at least 1: callers split longer
    batches, so that intermediate results stay in a cache (host) or in memory (elsewhere).
    """
    entries = HOST_ENTRIES if torch.device(device).type == HOST else DEVICE_ENTRIES
    return max(1, entries // vocab)


def row_slices(rows: int, max_rows: int) -> list[slice]:
    """Slices that divide `rows` rows into runs of at most `max_rows`."""
    return [slice(start, min(start + max_rows, rows)) for start in range(0, rows, max_rows)]


@dataclass(frozen=True)
class BatchRow:
    """A position of a sequence whose next token is to be chosen.

    Args:
        params: of its request.
        seed: of its sequence, a signed 64-bit integer (`request/seeds.py`).
        position: tokens generated before it, drafts of this step included. It is also the index of the seed's random
            number that the row uses.
        history: of its sequence, without drafts of this step. Needed when `params.penalizes`.
        drafts: drafts of this step before the row.
        end_ids: tokens that end the sequence, banned before `params.min_tokens`.
        allowed: tokens that the constraint allows, of `Constraint.masks`: int32 `[ceil(V / 32)]`, a bit
            per token, the lowest bit first; None allows all.
    """

    params: SamplingParams
    seed: int
    position: int
    history: History | None = None
    drafts: Sequence[int] = ()
    end_ids: Collection[int] = ()
    allowed: np.ndarray | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether its token is the argmax of the model's own logits, and nothing but the token is returned."""
        return self.params.is_plain_greedy and self.allowed is None and self.position >= self.params.min_tokens


@dataclass(frozen=True)
class RowGroup:
    """Rows that are sampled together, and in the same way.

    Args:
        kind: GREEDY, PLAIN, SHORT or FULL.
        rows: their indices: a slice, or int64 `[n]`.
        temperature: float32 `[n]`, 0 for greedy rows.
        top_k: int64 `[n]`, for SHORT and FULL.
        top_p: float32 `[n]`, for SHORT and FULL.
        min_p: float32 `[n]`, for SHORT and FULL.
        uniform: float32 `[n]`; None for greedy rows.
        candidates: length of the short list.
    """

    kind: int
    rows: slice | torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    uniform: torch.Tensor | None
    candidates: int


@dataclass(frozen=True)
class SamplerInputs:
    """The sampling parameters of a step's rows, on the device. A field that no row uses is None.

    Args:
        seeds: int64 `[R]`, for further random numbers: `rng.uniform(seeds, positions, stream)`, streams from 1 on;
            None together with `positions`.
        positions: int64 `[R]`; may be None if all rows are greedy.
        groups: rows by how they are sampled; a group has at most as many as a kernel should process at once.
        penalties: row, token int64 and times generated float32, `[N]` each; then repetition, frequency and presence
            penalty, float32 `[R]` each.
        bias: row, token int64, value to add float32, `[N]` each.
        banned: row, token int64, `[N]` each.
        masks: rows int64 `[C]`, allowed tokens int32 `[C, ceil(V / 32)]`.
        logprobs: rows that return log-probabilities, int64 `[L]`.
        alternatives: how many alternatives each of these rows returns, on the host.
    """

    seeds: torch.Tensor | None
    positions: torch.Tensor | None
    groups: tuple[RowGroup, ...]
    penalties: tuple[torch.Tensor, ...] | None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    banned: tuple[torch.Tensor, torch.Tensor] | None
    masks: tuple[torch.Tensor, torch.Tensor] | None
    logprobs: torch.Tensor | None
    alternatives: tuple[int, ...]


def sampler_inputs(rows: Sequence[BatchRow], vocab: int, device: Any) -> SamplerInputs:
    """Gather the parameters of the rows, draw their random numbers, and copy all to the device, in one copy per dtype,
    without waiting for it.

    Args:
        rows: one per row of the logits, in the same order; at least one.
        vocab: V, columns of the logits.
        device: where the logits are.
    """
    seeds = np.array([r.seed for r in rows], np.int64)
    positions = np.array([r.position for r in rows], np.int64)
    with_logprobs = [i for i, r in enumerate(rows) if r.params.logprobs is not None]
    masks, stuck = _masks(rows)
    gathered = (
        seeds,
        positions,
        _groups(rows, vocab, seeds, positions),
        _penalties(rows),
        _bias(rows),
        _ban_end_tokens(rows, vocab, stuck),
        masks,
        np.array(with_logprobs, np.int64) if with_logprobs else None,
    )
    first, second, groups, *rest = to_device(gathered, device)
    alternatives = tuple(rows[i].params.logprobs or 0 for i in with_logprobs)
    made: Any = (first, second, tuple(RowGroup(*g) for g in groups), *rest, alternatives)
    return SamplerInputs(*made)


def greedy_inputs(rows: int, vocab: int, device: Any) -> SamplerInputs:
    """The inputs for `rows` plain greedy rows, made on the device; they hold nothing of a step, so every step can use
    them.
    """
    slices = row_slices(rows, max(1, DEVICE_ENTRIES // vocab))
    zeros = torch.zeros(rows, dtype=torch.float32, device=device)
    groups = tuple(RowGroup(GREEDY, at, zeros[at], None, None, None, None, 0) for at in slices)
    return SamplerInputs(None, None, groups, None, None, None, None, None, ())


def sampling_kind(params: SamplingParams, vocab: int) -> int:
    """How rows of a request are sampled: GREEDY, PLAIN, SHORT or FULL; `vocab` is V."""
    if params.temperature < MAX_GREEDY_TEMPERATURE:
        return GREEDY
    if not params.filters:
        return PLAIN
    return SHORT if 0 < params.top_k <= SHORTLIST_TOKENS and 4 * params.top_k <= vocab else FULL


def _groups(rows: Sequence[BatchRow], vocab: int, seeds: np.ndarray, positions: np.ndarray) -> Any:
    """The fields of each `RowGroup`: rows of one kind, at most as many as a device's kernel should process at once."""
    kinds, max_rows = [sampling_kind(r.params, vocab) for r in rows], max(1, DEVICE_ENTRIES // vocab)
    uniform = None
    if any(k != GREEDY for k in kinds):
        uniform = rng.uniform(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
    groups = []
    for kind in sorted(set(kinds)):
        alike = [i for i, k in enumerate(kinds) if k == kind]
        for start in range(0, len(alike), max_rows):
            at = alike[start : start + max_rows]
            some = [rows[i].params for i in at]
            is_slice = at[-1] - at[0] == len(at) - 1
            index = slice(at[0], at[-1] + 1) if is_slice else np.array(at, np.int64)
            temperature = np.array([0.0 if kind == GREEDY else p.temperature for p in some], np.float32)
            filters: tuple[Any, ...] = (None, None, None)
            if kind in (SHORT, FULL):
                top_k = np.array([p.top_k for p in some], np.int64)
                filters = top_k, *np.array([(p.top_p, p.min_p) for p in some], np.float32).T
            # A power of two, so that there are few different shapes.
            candidates = 1 << (max(p.top_k for p in some) - 1).bit_length() if kind == SHORT else 0
            drawn = uniform[at] if uniform is not None and kind != GREEDY else None
            groups.append((kind, index, temperature, *filters, drawn, min(candidates, vocab)))
    return tuple(groups)


def _penalties(rows: Sequence[BatchRow]) -> tuple[np.ndarray, ...] | None:
    """The field `penalties` of `SamplerInputs`: the tokens of the rows with penalties; None if there are none."""
    found = []
    for i, r in enumerate(rows):
        if r.params.penalizes:
            assert r.history is not None, "a row with penalties needs its history"
            tokens, times = r.history.counts(r.drafts)
            found.append((np.full(len(tokens), i, np.int64), tokens, times))
    if not found:
        return None
    columns = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (r.params for r in rows)]
    return (*map(np.concatenate, zip(*found)), *np.array(columns, np.float32).T)


def _bias(rows: Sequence[BatchRow]) -> tuple[np.ndarray, ...] | None:
    """The field `bias` of `SamplerInputs`; None if no row has a bias."""
    entries = [(i, token, b) for i, r in enumerate(rows) for token, b in r.params.logit_bias.items()]
    if not entries:
        return None
    at, ids, bias = zip(*entries)
    return np.array(at, np.int64), np.array(ids, np.int64), np.array(bias, np.float32)


def _masks(rows: Sequence[BatchRow]) -> tuple[tuple[np.ndarray, np.ndarray] | None, set[int]]:
    """The field `masks` of `SamplerInputs`: rows with a constraint and their masks; and the rows whose constraint
    allows end tokens only before `min_tokens`, which then does not hold.
    """
    masked = {i: r.allowed for i, r in enumerate(rows) if r.allowed is not None}
    if not masked:
        return None, set()
    stuck = set()
    for i, bits in masked.items():
        if rows[i].position < rows[i].params.min_tokens:
            rest = bits.view(np.uint32).copy()
            for token in rows[i].end_ids:
                if token < 32 * len(rest):
                    rest[token // 32] &= ~np.uint32(1 << (token % 32))
            if not rest.any():
                stuck.add(i)
    return (np.array(list(masked), np.int64), np.stack(list(masked.values()))), stuck


def _ban_end_tokens(rows: Sequence[BatchRow], vocab: int, stuck: set[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """The field `banned` of `SamplerInputs`: the end tokens of rows before `min_tokens`, except the rows in `stuck`."""
    early = [i for i, r in enumerate(rows) if r.position < r.params.min_tokens and i not in stuck]
    pairs = [(i, token) for i in early for token in rows[i].end_ids if token < vocab]
    if not pairs:
        return None
    at, ids = zip(*pairs)
    return np.array(at, np.int64), np.array(ids, np.int64)


def to_device(tree: Any, device: Any) -> Any:
    """Replace the NumPy arrays in a tree of nested tuples by tensors on the device: one copy per dtype, no copy for the
    host, whose tensors share the arrays' memory. Other leaves stay as they are. Does not wait for the device.
    """
    arrays = list(_arrays(tree))
    if torch.device(device).type == HOST:
        return _rebuilt(tree, iter([torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]))
    sent: dict[int, torch.Tensor] = {}
    for dtype in {a.dtype for a in arrays}:
        some = [(i, a) for i, a in enumerate(arrays) if a.dtype == dtype]
        joined = torch.from_numpy(np.concatenate([a.reshape(-1) for _, a in some])).to(device, non_blocking=True)
        parts = joined.split([a.size for _, a in some])
        sent.update((i, part.view(a.shape)) for (i, a), part in zip(some, parts))
    return _rebuilt(tree, iter([sent[i] for i in range(len(arrays))]))


def _arrays(tree: Any) -> Iterator[np.ndarray]:
    """The arrays of a tree of tuples, from left to right."""
    if isinstance(tree, tuple):
        for branch in tree:
            yield from _arrays(branch)
    elif isinstance(tree, np.ndarray):
        yield tree


def _rebuilt(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The tree with its arrays replaced, from left to right, by the next of `tensors`."""
    if isinstance(tree, tuple):
        return tuple(_rebuilt(branch, tensors) for branch in tree)
    return next(tensors) if isinstance(tree, np.ndarray) else tree
