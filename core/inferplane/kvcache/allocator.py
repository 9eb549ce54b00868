"""Allocates KV cache blocks and finds blocks that hold a known prefix. Pure host code in integers, without tensors.

A block is *free*, *used* (sequences use it) or *cached*: no sequence uses it, but a hash identifies its content, which
a later sequence may reuse. When free blocks run out, cached blocks are reused, the least recently released one first.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from inferplane.errors import CapacityError, UsageError


def root_hash(*facts: object) -> bytes:
    """Return the hash that precedes a sequence's first block. `facts`: what entries depend on (model, dtype, salt)."""
    return hashlib.sha256(repr(facts).encode()).digest()


def block_hashes(
    root: bytes, tokens: Sequence[int], block_tokens: int, known: Sequence[bytes] = (), lookahead: int = 0
) -> list[bytes]:
    """Return the SHA-256 of each full block of a sequence, over the previous block's hash and the block's tokens.

    Args:
        root: the result of `root_hash`.
        tokens: the sequence from its start; a last partial block has no hash.
        block_tokens: tokens per block.
        known: hashes of the first blocks, computed earlier.
        lookahead: number of tokens after a block that its hash covers too; a block without them has no hash.
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
    """Allocates block numbers, counts the users of each block, and remembers the content of released blocks.

    `free + cached + used == total` holds between calls. The lowest free block is allocated first, so runs repeat.

    Args:
        total: number of blocks, at least 1.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise UsageError(f"A KV cache of {total} blocks.", remedy="give it at least one block")
        self.total = total
        self._free = list(range(total))  # a heap
        self._users: dict[int, int] = {}
        self._cached: dict[int, None] = {}  # in order of release
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of blocks without reusable content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks without users whose content is known."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Number of blocks with at least one user."""
        return len(self._users)

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    def users(self, block: int) -> int:
        """Number of sequences that use a block."""
        return self._users.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one user each. Cached blocks lose their content as needed.

        Raises:
            CapacityError: fewer blocks are available; none is allocated.
        """
        if count < 0:
            raise UsageError(f"{count} KV blocks were requested.")
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

    def release(self, blocks: list[int]) -> None:
        """Remove one user of each block. A block without users becomes cached if its content is known, otherwise free.

        Raises:
            UsageError: a block has no user; no block is released.
        """
        for block, count in Counter(blocks).items():
            if self._users.get(block, 0) < count:
                raise UsageError(f"KV block {block} is released twice.")
        # Last blocks first, so that the tail of a cached prefix is reused before its head.
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
        """Register the content hash of a used block, unless another block is registered with the same content.

        Raises:
            UsageError: the block has no user.
        """
        if block not in self._users:
            raise UsageError(f"KV block {block} is free; only used blocks can be published.")
        if content not in self._by_hash and block not in self._hash_of:
            self._by_hash[content] = block
            self._hash_of[block] = content

    def acquire(self, contents: Sequence[bytes]) -> list[int]:
        """Return the blocks with these known contents and add one user to each."""
        blocks = [self._by_hash[content] for content in contents]
        for block in blocks:
            self._cached.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return blocks

    def acquire_prefix(self, contents: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix and add one user to each.

        Args:
            contents: hashes of a sequence's full blocks, in order.
        """
        return self.acquire(contents[: self.count_prefix(contents)])

    def knows(self, content: bytes) -> bool:
        """Whether a block holds this content."""
        return content in self._by_hash

    def count_prefix(self, contents: Sequence[bytes]) -> int:
        """Number of blocks that `acquire_prefix` would return."""
        unknown = (i for i, content in enumerate(contents) if content not in self._by_hash)
        return next(unknown, len(contents))

    def clear(self) -> None:
        """Free every cached block."""
        for block in list(self._cached):
            del self._cached[block]
            self._forget(block)
            heapq.heappush(self._free, block)

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._by_hash[content]

    def check(self) -> None:
        """Raise AssertionError if the allocator's records contradict each other. For tests and debugging."""
        assert self.free + self.cached + self.used == self.total, (self.free, self.cached, self.used, self.total)
        assert len({*self._free, *self._cached, *self._users}) == self.total
        assert all(n > 0 for n in self._users.values())
        assert all(self._by_hash[c] == b for b, c in self._hash_of.items())
        assert set(self._cached) <= set(self._hash_of)
