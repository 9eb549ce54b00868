"""What each key uses, over all processes that serve (sequences, requests, tokens), and its shares of them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from inferplane.serving.errors import ApiError
from inferplane.serving.keys import MAX_KEYS, AccessKey, Keys
from inferplane.serving.shared_state.counters import NUM_CELLS
from inferplane.serving.shared_state.shared_counters import SharedCounters

WINDOW_S, STEP_S = 60.0, 1.0
"""A share of tokens is for the last minute, in steps of a second."""
SEQUENCES, REQUESTS, TOKENS = range(3)
TOTAL_CELLS = NUM_CELLS + 3 * MAX_KEYS
"""Cells of a row in the table that the processes share: everyone's numbers, then three for each key."""


class Shares(NamedTuple):
    """What one key may use.

    Args:
        max_sequences: sequences that run or wait at a time; None: as many as all.
        tokens_per_minute: tokens of prompts and answers in the last minute; None: any number.
    """

    max_sequences: int | None = None
    tokens_per_minute: int | None = None


class KeyUsage:
    """Counts what each key uses, and refuses what is beyond its shares.

    Args:
        keys: of this server.
        shares: of each key; None: no limits.
        shared: a table with `TOTAL_CELLS` cells per row; None creates one for this process alone.
        process: this process's row in `shared`.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        shares: Shares | None = None,
        shared: SharedCounters | None = None,
        process: int = 0,
    ) -> None:
        self._keys, self._shares, self._process = keys or Keys(), shares or Shares(), process
        self._shared = shared or SharedCounters(1, TOTAL_CELLS)
        self._seen = [self._shared.sum(NUM_CELLS + 3 * row + TOKENS) for row in range(MAX_KEYS)]
        """Each key's tokens, when they were last looked at."""
        self._recent: dict[int, deque[list[float]]] = {}
        """By a key's row: seconds of the last minute in which it used tokens, and how many."""

    def acquire(self, key: AccessKey | None, count: int) -> None:
        """Count sequences that a key begins.

        Raises:
            ApiError: 429, they are more than the key's shares.
        """
        if key is None:
            return
        in_use = self._sum(key, SEQUENCES)
        limit, tokens = self._shares
        if limit is not None and in_use + count > limit:
            what = f"{in_use} sequences of this key are being served or wait, of at most {limit}"
            raise ApiError(429, f"{what}. Try again later.", code="key_queue_full", retry_after_s=1)
        if tokens is not None and count:
            self._check_tokens(key, tokens)
        self._add(key, SEQUENCES, count)

    def release(self, key: AccessKey | None, count: int) -> None:
        """Count sequences that ended."""
        if key is not None:
            self._add(key, SEQUENCES, -count)

    def add_request(self, key: AccessKey | None, tokens: int) -> None:
        """Count a request that was accepted and has ended, with the tokens of its prompts and answers."""
        if key is not None:
            self._add(key, REQUESTS, 1)
            self._add(key, TOKENS, tokens)
            self._note_tokens(key)

    def items(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each key's name, and its sequences now, its ended requests, and their tokens since the start."""
        for key in self._keys.all:
            yield key.name, [self._sum(key, number) for number in (SEQUENCES, REQUESTS, TOKENS)]

    def _check_tokens(self, key: AccessKey, limit: int) -> None:
        recent, now = self._note_tokens(key), time.monotonic()
        used = sum(tokens for _, tokens in recent)
        left, wait_s = used, 0.0
        for second, tokens in recent:
            if left < limit:
                break
            left, wait_s = left - tokens, second + WINDOW_S - now
        if used >= limit:
            shown = max(1, math.ceil(wait_s))
            what = f"{used:.0f} tokens of this key in the last minute, of at most {limit}. Try again in {shown} s."
            raise ApiError(429, what, code="key_tokens_used_up", retry_after_s=shown)

    def _note_tokens(self, key: AccessKey) -> deque[list[float]]:
        """Return the seconds of the last minute in which a key used tokens, here or in another process."""
        now, total = time.monotonic(), self._sum(key, TOKENS)
        recent, new = self._recent.setdefault(key.row, deque()), total - self._seen[key.row]
        self._seen[key.row] = total
        if new and recent and now - recent[-1][0] < STEP_S:
            recent[-1][1] += new
        elif new:
            recent.append([now, new])
        while recent and recent[0][0] <= now - WINDOW_S:
            recent.popleft()
        return recent

    def _sum(self, key: AccessKey, number: int) -> int:
        return self._shared.sum(NUM_CELLS + 3 * key.row + number)

    def _add(self, key: AccessKey, number: int, count: int) -> None:
        cell = NUM_CELLS + 3 * key.row + number
        self._shared.write(self._process, cell, self._shared.read(self._process, cell) + count)


def sequence_cells() -> Iterator[int]:
    """Yield the cells of all keys' sequences, which end with their process."""
    yield from range(NUM_CELLS + SEQUENCES, TOTAL_CELLS, 3)
