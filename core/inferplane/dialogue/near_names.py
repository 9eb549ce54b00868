"""The known name that a mistyped one is near: for fields of requests and for keys of messages."""

from __future__ import annotations

from functools import lru_cache

MAX_TYPO_DISTANCE = 2
MAX_CHARACTERS = 100
"""A longer name is no mistyped one; `find_nearest` keeps the names it has seen."""


def find_nearest(name: str, known: tuple[str, ...]) -> str:
    """Return the known name that a name is mistyped from; "" if there is none. Case and underscores do not count.

    Short names have more neighbours: less than half of a name may differ.
    """
    return search(name, known) if len(name) <= MAX_CHARACTERS else ""


@lru_cache(maxsize=1024)
def search(name: str, known: tuple[str, ...]) -> str:
    """As `find_nearest`, for names of any length."""
    plain, found = _fold(name), []
    for k in known:
        folded = _fold(k)
        if abs(len(plain) - len(folded)) <= MAX_TYPO_DISTANCE:
            distance = _distance(plain, folded)
            if distance <= MAX_TYPO_DISTANCE and 2 * distance < len(k):
                found.append((distance, _distance(name, k), k))
    return min(found)[2] if found else ""


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _distance(a: str, b: str) -> int:
    """Return the fewest characters to insert, delete, replace or swap with their neighbour (Damerau and Levenshtein's
    distance, in which no character is changed twice).
    """
    older, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                row[j] = min(row[j], older[j - 2] + 1)
        older = above
    return row[-1]
