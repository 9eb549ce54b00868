"""Who owns which block. Pure host code in integers; it knows nothing of tensors."""

from __future__ import annotations

import heapq
from collections import Counter

from inferplane.errors import CapacityError, UsageError


class BlockAllocator:
    """Hands out block numbers and counts their users.

    `free + used == total` holds between calls. Block numbers are handed out lowest first, so that runs are repeatable.

    Args:
        total: number of blocks, at least 1.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise UsageError(f"A KV cache of {total} blocks.", remedy="give it at least one block")
        self.total = total
        self._free = list(range(total))  # a heap
        self._users: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks nobody uses."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks with at least one user."""
        return len(self._users)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one user each.

        Raises:
            CapacityError: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} KV blocks are needed.",
                there_is=f"{len(self._free)} free of {self.total}",
                remedy="run fewer or shorter sequences at once, or give the cache more memory",
            )
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Count one more user of each block.

        Raises:
            UsageError: a block is free.
        """
        for block in blocks:
            if block not in self._users:
                raise UsageError(f"KV block {block} is free and cannot be shared.")
        for block in blocks:
            self._users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Count one user less of each block; blocks without users become free.

        Raises:
            UsageError: a block has fewer users than are taken from it; none is given back.
        """
        counts = Counter(blocks)
        for block, n in counts.items():
            if self._users.get(block, 0) < n:
                raise UsageError(f"KV block {block} is given back twice.")
        for block, n in counts.items():
            self._users[block] -= n
            if not self._users[block]:
                del self._users[block]
                heapq.heappush(self._free, block)
