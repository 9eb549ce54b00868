"""Which tokens a sequence holds and how often: what the penalties of repetition, frequency and presence read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class History:
    """The distinct tokens of a sequence, and how often each was generated; for sequences with penalties.

    Args:
        prompt: token ids.
        generated: token ids generated so far.
    """

    def __init__(self, prompt: Sequence[int], generated: Iterable[int] = ()) -> None:
        self._index = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._index, np.int64, len(self._index))
        self._counts = np.zeros(len(self._ids), np.float32)
        self.extend(generated)

    def extend(self, tokens: Iterable[int]) -> None:
        """Count newly generated tokens, each once per occurrence."""
        for token in tokens:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):  # grow by more than one, so that growing costs little per token
                self._ids = np.concatenate((self._ids, np.zeros(index + 16, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(index + 16, np.float32)))
            self._ids[index] = token
            self._counts[index] += 1

    def counts(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids of prompt and generated tokens, int64 `[N]`, and how often each was generated, float32 `[N]` (0:
        in the prompt only). `drafts` count as generated for this call only. Without drafts the arrays are views, which
        `extend` changes.
        """
        n = len(self._index)
        if not drafts:
            return self._ids[:n], self._counts[:n]
        new = {token: n + i for i, token in enumerate(t for t in dict.fromkeys(drafts) if t not in self._index)}
        ids = np.concatenate((self._ids[:n], np.fromiter(new, np.int64, len(new))))
        counts = np.concatenate((self._counts[:n], np.zeros(len(new), np.float32)))
        for token in drafts:
            counts[new[token] if token in new else self._index[token]] += 1
        return ids, counts
