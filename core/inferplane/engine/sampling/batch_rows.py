"""What the rows of a step ask of the sampler, gathered on the host and sent to the device at once.

A row is one place in one sequence whose next token is wanted. A sequence brings one row a step, or several when drafts
are verified; the row then knows which drafts stand before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling import rng
from inferplane.types import HOST

COLDEST = 1e-5
"""Temperatures below this take the likeliest token, as if they were 0."""
SHORTLIST_TOKENS = 1024
"""Rows with a top_k up to this are reduced to their likeliest tokens before anything is sorted."""
HOST_ENTRIES, DEVICE_ENTRIES = 2**18, 2**24
"""Logits that torch works on at once: on the host what stays in a core's cache; elsewhere what fills any device."""

GREEDY, PLAIN, SHORT, FULL = range(4)
"""How a row is drawn: the likeliest token; from all; from a short list; from all, sorted."""


def rows_at_once(vocab: int, device: Any) -> int:
    """Rows of `vocab` logits that are best worked on together."""
    entries = HOST_ENTRIES if torch.device(device).type == HOST else DEVICE_ENTRIES
    return max(1, entries // vocab)


class History:
    """The distinct tokens of a sequence, and how often each was generated; for sequences with penalties.

    Args:
        prompt: token ids.
        generated: token ids generated so far.
    """

    def __init__(self, prompt: Sequence[int], generated: Iterable[int] = ()) -> None:
        self._place = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._place, np.int64, len(self._place))
        self._counts = np.zeros(len(self._ids), np.float32)
        self.extend(generated)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in generated tokens."""
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):  # double the room
                self._ids = np.concatenate((self._ids, np.zeros(place + 16, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(place + 16, np.float32)))
            self._ids[place] = token
            self._counts[place] += 1

    def counts(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids, int64 `[N]`, and how often each was generated, float32 `[N]`, as if `drafts` had been, too."""
        n = len(self._place)
        if not drafts:
            return self._ids[:n], self._counts[:n]
        place = {token: n + i for i, token in enumerate(t for t in dict.fromkeys(drafts) if t not in self._place)}
        ids = np.concatenate((self._ids[:n], np.fromiter(place, np.int64, len(place))))
        counts = np.concatenate((self._counts[:n], np.zeros(len(place), np.float32)))
        for token in drafts:
            counts[place[token] if token in place else self._place[token]] += 1
        return ids, counts


def takes_likeliest(p: SamplingParams) -> bool:
    """Whether rows of a request take the likeliest token of the logits as they are, and ask for nothing else; a
    constraint and `min_tokens` aside.
    """
    return p.temperature < COLDEST and p.logprobs is None and not p.logit_bias and not p.penalizes


@dataclass(frozen=True)
class SampleRow:
    """A place whose next token is wanted.

    Args:
        params: of its request.
        seed: of its sequence, a signed 64-bit integer (`rng.as_int64`, `rng.child_seed`).
        position: tokens generated before it, drafts of this step included. It is also which of the seed's random
            numbers the row takes.
        history: of its sequence, without drafts of this step. Needed when `params.penalizes`.
        drafts: drafts of this step that stand before the row.
        end_ids: tokens that end the sequence, banned before `params.min_tokens`.
        allowed: what the constraint allows, as `Constraint.masks` gives it: int32 `[ceil(V / 32)]`, a bit a token, the
            lowest bit first; None allows all.
    """

    params: SamplingParams
    seed: int
    position: int
    history: History | None = None
    drafts: Sequence[int] = ()
    end_ids: Collection[int] = ()
    allowed: np.ndarray | None = None

    @property
    def likeliest_alone(self) -> bool:
        """Whether it takes the likeliest token of the logits as they are, and asks for nothing else."""
        return takes_likeliest(self.params) and self.allowed is None and self.position >= self.params.min_tokens


@dataclass(frozen=True)
class Group:
    """Rows that are drawn together, and in the same way.

    Args:
        kind: GREEDY, PLAIN, SHORT or FULL.
        rows: which they are: a slice, or int64 `[n]`.
        temperature: float32 `[n]`, 0 for greedy rows.
        top_k: int64 `[n]`, for SHORT and FULL.
        top_p: float32 `[n]`, for SHORT and FULL.
        min_p: float32 `[n]`, for SHORT and FULL.
        uniform: float32 `[n]`; None for greedy rows.
        candidates: tokens of the short list.
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
class Prepared:
    """What a step's rows ask for, on the device. What no row asks for is None.

    Args:
        seeds: int64 `[R]`, for further random numbers: `rng.uniform(seeds, positions, stream)`, streams from 1 on;
            None where `positions` is.
        positions: int64 `[R]`; None may stand where all rows take the likeliest token.
        groups: rows by how they are drawn, and no more in a group than are best drawn at once.
        penalties: row, token int64 and times generated float32, `[N]` each; then repetition, frequency and presence
            penalty, float32 `[R]` each.
        bias: row, token int64, what to add float32, `[N]` each.
        banned: row, token int64, `[N]` each.
        masks: rows int64 `[C]`, allowed tokens int32 `[C, ceil(V / 32)]`.
        logprobs: rows that want log-probabilities, int64 `[L]`.
        alternatives: how many each of these rows wants, on the host.
    """

    seeds: torch.Tensor | None
    positions: torch.Tensor | None
    groups: tuple[Group, ...]
    penalties: tuple[torch.Tensor, ...] | None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    banned: tuple[torch.Tensor, torch.Tensor] | None
    masks: tuple[torch.Tensor, torch.Tensor] | None
    logprobs: torch.Tensor | None
    alternatives: tuple[int, ...]


def prepare(rows: Sequence[SampleRow], vocab: int, device: Any) -> Prepared:
    """Gather what the rows ask for and send it to the device, in one copy for each dtype.

    Args:
        rows: one for each row of the logits, in their order; at least one.
        vocab: V, columns of the logits.
        device: where the logits are.
    """
    seeds = np.array([r.seed for r in rows], np.int64)
    positions = np.array([r.position for r in rows], np.int64)
    wanting = [i for i, r in enumerate(rows) if r.params.logprobs is not None]
    masks, stuck = _masks(rows)
    gathered = (
        seeds,
        positions,
        _groups(rows, vocab, seeds, positions),
        _penalties(rows),
        _bias(rows),
        _banned(rows, vocab, stuck),
        masks,
        np.array(wanting, np.int64) if wanting else None,
    )
    first, second, groups, *rest = send(gathered, device)
    alternatives = tuple(rows[i].params.logprobs or 0 for i in wanting)
    prepared: Any = (first, second, tuple(Group(*g) for g in groups), *rest, alternatives)
    return Prepared(*prepared)


def prepare_likeliest(rows: int, vocab: int, device: Any) -> Prepared:
    """What `rows` rows ask for that ask for nothing but their likeliest tokens: the same in every step."""
    most = max(1, DEVICE_ENTRIES // vocab)
    slices = [slice(i, min(i + most, rows)) for i in range(0, rows, most)]
    zeros = torch.zeros(rows, dtype=torch.float32, device=device)
    groups = tuple(Group(GREEDY, at, zeros[at], None, None, None, None, 0) for at in slices)
    return Prepared(None, None, groups, None, None, None, None, None, ())


def draws(p: SamplingParams, vocab: int) -> int:
    """How rows of a request are drawn: GREEDY, PLAIN, SHORT or FULL; `vocab` is V."""
    if p.temperature < COLDEST:
        return GREEDY
    if not p.cuts:
        return PLAIN
    return SHORT if 0 < p.top_k <= SHORTLIST_TOKENS and 4 * p.top_k <= vocab else FULL


def _groups(rows: Sequence[SampleRow], vocab: int, seeds: np.ndarray, positions: np.ndarray) -> Any:
    """Fields of groups, no larger than a device's kernel takes at once; the host's take row by row."""
    kinds, most = [draws(r.params, vocab) for r in rows], max(1, DEVICE_ENTRIES // vocab)
    uniform = None
    if any(k != GREEDY for k in kinds):
        uniform = rng.uniform(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
    groups = []
    for kind in sorted(set(kinds)):
        alike = [i for i, k in enumerate(kinds) if k == kind]
        for start in range(0, len(alike), most):
            at = alike[start : start + most]
            some = [rows[i].params for i in at]
            together = at[-1] - at[0] == len(at) - 1
            index = slice(at[0], at[-1] + 1) if together else np.array(at, np.int64)
            temperature = np.array([0.0 if kind == GREEDY else p.temperature for p in some], np.float32)
            cuts: tuple[Any, ...] = (None, None, None)
            if kind in (SHORT, FULL):
                top_k = np.array([p.top_k for p in some], np.int64)
                cuts = top_k, *np.array([(p.top_p, p.min_p) for p in some], np.float32).T
            # A power of two, so that there are few different shapes.
            candidates = 1 << (max(p.top_k for p in some) - 1).bit_length() if kind == SHORT else 0
            drawn = uniform[at] if uniform is not None and kind != GREEDY else None
            groups.append((kind, index, temperature, *cuts, drawn, min(candidates, vocab)))
    return tuple(groups)


def _penalties(rows: Sequence[SampleRow]) -> tuple[np.ndarray, ...] | None:
    at, ids, counts = [], [], []
    for i, r in enumerate(rows):
        if r.params.penalizes:
            assert r.history is not None, "a row with penalties needs its history"
            tokens, times = r.history.counts(r.drafts)
            at.append(np.full(len(tokens), i, np.int64))
            ids.append(tokens)
            counts.append(times)
    if not at:
        return None
    columns = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (r.params for r in rows)]
    return (*(np.concatenate(x) for x in (at, ids, counts)), *np.array(columns, np.float32).T)


def _bias(rows: Sequence[SampleRow]) -> tuple[np.ndarray, ...] | None:
    entries = [(i, token, b) for i, r in enumerate(rows) for token, b in r.params.logit_bias.items()]
    if not entries:
        return None
    at, ids, bias = zip(*entries)
    return np.array(at, np.int64), np.array(ids, np.int64), np.array(bias, np.float32)


def _masks(rows: Sequence[SampleRow]) -> tuple[tuple[np.ndarray, np.ndarray] | None, set[int]]:
    """Rows with a constraint and what they allow; and the rows that allow nothing but the end."""
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


def _banned(rows: Sequence[SampleRow], vocab: int, stuck: set[int]) -> tuple[np.ndarray, np.ndarray] | None:
    early = [i for i, r in enumerate(rows) if r.position < r.params.min_tokens and i not in stuck]
    pairs = [(i, token) for i in early for token in rows[i].end_ids if token < vocab]
    if not pairs:
        return None
    at, ids = zip(*pairs)
    return np.array(at, np.int64), np.array(ids, np.int64)


def send(tree: Any, device: Any) -> Any:
    """The same tree of tuples with its arrays as tensors on the device: sent in one copy for each dtype, or to the host
    not at all.
    """
    arrays = list(_arrays(tree))
    if torch.device(device).type == HOST:
        return _rebuilt(tree, iter([torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]))
    sent: dict[int, torch.Tensor] = {}
    for dtype in {a.dtype for a in arrays}:
        some = [(i, a) for i, a in enumerate(arrays) if a.dtype == dtype]
        whole = torch.from_numpy(np.concatenate([a.reshape(-1) for _, a in some])).to(device, non_blocking=True)
        parts = whole.split([a.size for _, a in some])
        sent.update((i, part.view(a.shape)) for (i, a), part in zip(some, parts))
    return _rebuilt(tree, iter([sent[i] for i in range(len(arrays))]))


def _arrays(tree: Any) -> Iterator[np.ndarray]:
    if isinstance(tree, tuple):
        for branch in tree:
            yield from _arrays(branch)
    elif isinstance(tree, np.ndarray):
        yield tree


def _rebuilt(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(tree, tuple):
        return tuple(_rebuilt(branch, tensors) for branch in tree)
    return next(tensors) if isinstance(tree, np.ndarray) else tree
