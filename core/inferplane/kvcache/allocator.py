"""Who owns which block, and which blocks can be used again. Pure host code in integers; it knows nothing of tensors.

A block is *free*, *used* (it has users) or *cached*: nobody uses it, but what it holds is known by a hash and may be
wanted again. Cached blocks are taken when free ones run out, the one that was released longest ago first.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

import numpy as np

from inferplane.errors import CapacityError, UsageError


def root_hash(*facts: object) -> bytes:
    """The hash a sequence's first block builds on: whatever must differ for entries to differ (model, dtype, salt)."""
    return hashlib.sha256(repr(facts).encode()).digest()


def block_hashes(
    root: bytes, tokens: Sequence[int], block_tokens: int, known: Sequence[bytes] = (), lookahead: int = 0
) -> list[bytes]:
    """SHA-256 of each full block of a sequence, each over its parent's hash and its own tokens.

    Args:
        root: see `root_hash`.
        tokens: the sequence from its start; a last partial block has no hash.
        block_tokens: tokens a block.
        known: hashes of its first blocks, computed before.
        lookahead: tokens behind a block that its hash covers too; a block without them has no hash.
    """
    out = list(known)
    parent = out[-1] if out else root
    width = block_tokens + lookahead
    for start in range(len(out) * block_tokens, len(tokens) - width + 1, block_tokens):
        content = np.asarray(tokens[start : start + width], dtype="<i8").tobytes()
        parent = hashlib.sha256(parent + content).digest()
        out.append(parent)
    return out


class BlockAllocator:
    """Hands out block numbers, counts their users, and remembers what released blocks hold.

    `free + cached + used == total` holds between calls. Free blocks are handed out lowest first, so runs repeat.

    Args:
        total: number of blocks, at least 1.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise UsageError(f"A KV cache of {total} blocks.", remedy="give it at least one block")
        self.total = total
        self._free = list(range(total))  # a heap
        self._users: dict[int, int] = {}
        self._cached: dict[int, None] = {}  # in the order of their release
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and whose content is known."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with at least one user."""
        return len(self._users)

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def users(self, block: int) -> int:
        """How many sequences use a block."""
        return self._users.get(block, 0)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one user each; cached ones are forgotten as needed.

        Raises:
            CapacityError: fewer are available; none is taken.
        """
        if count < 0:
            raise UsageError(f"{count} KV blocks were asked for.")
        if count > self.available:
            raise CapacityError(
                f"{count} KV blocks are needed.",
                there_is=f"{self.available} available of {self.total}",
                remedy="run fewer or shorter sequences at once, or give the cache more memory",
            )
        blocks = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                self._forget(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Count one more user of each block.

        Raises:
            UsageError: a block has no user.
        """
        for block in blocks:
            if block not in self._users:
                raise UsageError(f"KV block {block} is free and cannot be shared.")
        for block in blocks:
            self._users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Count one user less of each block; blocks without users become cached if their content is known, else free.

        Raises:
            UsageError: a block has no user; nothing is given back.
        """
        counts: dict[int, int] = {}
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
        for block, count in counts.items():
            if self._users.get(block, 0) < count:
                raise UsageError(f"KV block {block} is given back twice.")
        # Last blocks first: when room is needed, the tail of a prefix goes before its head.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)

    # -- content

    def publish(self, block: int, content: bytes) -> None:
        """Tell what a used block holds. The first block with a content keeps it; later ones stay unknown.

        Raises:
            UsageError: the block has no user.
        """
        if block not in self._users:
            raise UsageError(f"KV block {block} is free; only used blocks can be published.")
        if content not in self._by_hash and block not in self._hash_of:
            self._by_hash[content] = block
            self._hash_of[block] = content

    def match(self, contents: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, each with one more user.

        Args:
            contents: hashes of a sequence's full blocks, in order.
        """
        blocks = []
        for content in contents:
            block = self._by_hash.get(content)
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self._cached.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return blocks

    def matched(self, contents: Sequence[bytes]) -> int:
        """How many blocks `match` would return, without taking them."""
        n = 0
        for content in contents:
            if content not in self._by_hash:
                break
            n += 1
        return n

    def clear(self) -> None:
        """Forget the content of every cached block."""
        for block in list(self._cached):
            del self._cached[block]
            self._forget(block)
            heapq.heappush(self._free, block)

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._by_hash[content]

    def check(self) -> None:
        """Raise AssertionError when the books do not balance; for tests and debugging."""
        assert self.free + self.cached + self.used == self.total, (self.free, self.cached, self.used, self.total)
        assert len({*self._free, *self._cached, *self._users}) == self.total
        assert all(n > 0 for n in self._users.values())
        assert all(self._by_hash[c] == b for b, c in self._hash_of.items())
        assert set(self._cached) <= set(self._hash_of)
