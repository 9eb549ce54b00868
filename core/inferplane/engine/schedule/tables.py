"""The block tables of sequences: blocks are judged, taken, found and given back for all tables of a sequence at once.

It deals in integers only. Every table takes its blocks from its pool; a table whose layers attend to a window gives
back blocks before it (`inferplane.kvcache.tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from inferplane.engine.request.state import BlockTable, Request
from inferplane.kvcache import BlockAllocator, BlockPools, block_hashes, blocks_held
from inferplane.kvcache.tables import Windows

GivenBack = list[tuple[BlockAllocator, list[int]]]
"""Blocks that were given back, with the allocator of each list."""


class SequenceTables:
    """Gives sequences the blocks of their tables, and takes them back.

    Args:
        pools: the blocks.
        block_tokens: tokens per block.
        windows: the widest window of the layers of each table, in tokens; None: a layer attends to all tokens.

    Attributes: `allocators`, each table's; `held`, blocks that sequences gave back while a step that may use them is in
    flight; None: none is.
    """

    def __init__(self, pools: BlockPools, block_tokens: int, windows: Windows = (None,)) -> None:
        self.pools, self.block_tokens, self.windows = pools, block_tokens, tuple(windows)
        self.allocators = pools.list_allocators(len(self.windows))
        self.windowed = [(table, w) for table, w in enumerate(self.windows) if w is not None]
        self.held: GivenBack | None = None
        self._pools = [
            (pool, [table for table, allocator in enumerate(self.allocators) if allocator is pool])
            for pool in pools.pools
        ]

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that `tokens` tokens need in each table."""
        return -(-tokens // self.block_tokens)

    def find_shortage(self, tokens: int, step_tokens: int) -> tuple[int, int] | None:
        """The blocks that a sequence of `tokens` tokens holds at a time, with at most `step_tokens` of them in a step,
        and the fewer ones that there are, of the first pool that is too small for it alone; None: it fits.
        """
        for pool, tables in self._pools:
            need = blocks_held([self.windows[table] for table in tables], tokens, step_tokens, self.block_tokens)
            if need > pool.total:
                return need, pool.total
        return None

    def _are_available(self, needs: Sequence[int]) -> bool:
        """Whether each pool has as many blocks as its tables need, by table."""
        return all(sum(needs[table] for table in tables) <= pool.available for pool, tables in self._pools)

    def max_step_tokens(self, tokens: int, limit: int) -> int:
        """The largest number of tokens of a step, from 1 to `limit`, with which a sequence of `tokens` tokens fits into
        the pools alone; `limit` if it fits with none.
        """
        low, high = 1, limit
        if not self.windowed or self.find_shortage(tokens, low):
            return limit
        while low < high:  # a larger step needs more blocks
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if self.find_shortage(tokens, middle) else (middle, high)
        return low

    def first_blocks(self, request: Request, tokens: int) -> list[list[int]]:
        """Of each table, the blocks that hold a sequence's first `tokens` tokens."""
        stop = self.blocks_for(tokens)
        return [table.blocks[:stop] for table in request.tables]

    # -- taking

    def admit(self, request: Request, hashes: Sequence[bytes], step_tokens: int) -> bool:
        """Give a sequence without blocks those of its first step: known ones for its longest known prefix, which
        becomes `computed`, new ones for the rest. False, and nothing changes, if too few are available.

        A table without a window gets blocks for all known tokens of the sequence; one with a window for the first step
        only, because blocks that leave the window are free for the next step.

        Args:
            request: the sequence.
            hashes: of its full blocks that may be found, in order; none: nothing is found.
            step_tokens: largest number of tokens that the first step computes.
        """
        count = self.count_known(hashes) if hashes else 0
        known = count * self.block_tokens
        tables = []
        for table, window in enumerate(self.windows):
            first = self._count_passed(known, window)
            contents = [_content(content, table) for content in hashes[first:count]]
            tables.append(BlockTable([0] * first + self.allocators[table].acquire(contents), first))
        first_step = min(request.tokens, known + step_tokens)
        needs = [self.blocks_for(request.tokens if w is None else first_step) - count for w in self.windows]
        if not self._are_available(needs):
            for allocator, t in zip(self.allocators, tables):
                allocator.release(t.held)
            return False
        for allocator, t, need in zip(self.allocators, tables, needs):
            t.blocks.extend(allocator.allocate(need))
        request.tables, request.computed = tables, known
        return True

    def extend(self, request: Request, tokens: int) -> bool:
        """Give a sequence blocks for `tokens` tokens in all; False, and nothing is taken, if too few are available."""
        want = -(-tokens // self.block_tokens)
        needs = [max(0, want - len(table.blocks)) for table in request.tables]
        if not any(needs):
            return True
        if not self._are_available(needs):
            return False
        for allocator, table, need in zip(self.allocators, request.tables, needs):
            if need:
                table.blocks += allocator.allocate(need)
        return True

    def extend_all(self, lengths: Sequence[tuple[Request, int]]) -> bool:
        """`extend` for several sequences, each with its number of tokens: all get their blocks, or none (False)."""
        each = [[max(0, self.blocks_for(tokens) - len(t.blocks)) for t in r.tables] for r, tokens in lengths]
        needs = [sum(of_table) for of_table in zip(*each)]
        return self._are_available(needs) and all(self.extend(r, tokens) for r, tokens in lengths)

    # -- giving back

    def release_beyond(self, request: Request, tokens: int) -> int:
        """Release the blocks after those that hold a sequence's first `tokens` tokens; returns how many."""
        keep, count = self.blocks_for(tokens), 0
        for number, table in enumerate(request.tables):
            if surplus := table.blocks[keep:]:
                del table.blocks[keep:]
                self._give_back(number, surplus)
                count += len(surplus)
        return count

    def trim(self, running: Sequence[Request], drafts: Mapping[int, int]) -> int:
        """Take back blocks reserved for drafts, except the next step's, and drop these drafts; returns how many.

        Args:
            running: sequences with blocks.
            drafts: the number of drafts in the next step, by the id of the sequence's object; none where it is absent.
        """
        freed = 0
        for r in running:
            if surplus := self.release_beyond(r, r.tokens + drafts.get(id(r), 0)):
                freed += surplus
                # The draft model may have written their entries there, and would expect them in new blocks.
                del r.drafts[min(len(t.blocks) for t in r.tables) * self.block_tokens - r.tokens :]
        return freed

    def release_out_of_window(self, request: Request, computed: int | None = None) -> None:
        """Release the blocks that no layer of their table reads again once `computed` tokens are computed (None: those
        that are); they stand as 0 in it.
        """
        computed = request.computed if computed is None else computed
        for number, window in self.windowed:
            table, count = request.tables[number], self._count_passed(computed, window)
            if count > table.released:
                self._give_back(number, table.blocks[table.released : count])
                table.blocks[table.released : count] = [0] * (count - table.released)
                table.released = count

    def release_all(self, request: Request) -> None:
        """Release all blocks of a sequence."""
        for number, table in enumerate(request.tables):
            self._give_back(number, table.held)
        request.tables = []

    def _give_back(self, table: int, blocks: list[int]) -> None:
        if self.held is None:
            self.allocators[table].release(blocks)
        else:
            self.held.append((self.allocators[table], blocks))

    # -- content

    def publish(self, request: Request, first: int, stop: int) -> None:
        """Register what the blocks `first` to `stop` (without) of each table hold, by the sequence's hashes."""
        for number, table in enumerate(request.tables):
            for i in range(max(first, table.released), stop):
                self.allocators[number].publish(table.blocks[i], _content(request.hashes[i], number))

    def count_known(self, hashes: Sequence[bytes]) -> int:
        """The largest number of leading blocks that can be reused: every table without a window knows all of them,
        every other one those that a window before the next token reaches.
        """
        count = len(hashes)
        for table, window in enumerate(self.windows):
            if window is None:
                count = self.allocators[table].count_prefix([_content(h, table) for h in hashes[:count]])
        missing = count > 0 and bool(self.windowed)
        while missing:
            missing = False
            for table, window in self.windowed:
                needed = range(count - 1, self._count_passed(count * self.block_tokens, window) - 1, -1)
                knows = self.allocators[table].knows
                unknown = next((i for i in needed if not knows(_content(hashes[i], table))), None)
                if unknown is not None:  # of the sequences that reach beyond this block, each window needs it
                    count, missing = unknown, True
        return count

    def _count_passed(self, computed: int, window: int | None) -> int:
        """How many leading blocks no layer with this window reads again once `computed` tokens are computed."""
        return 0 if window is None else max(0, computed + 1 - window) // self.block_tokens


def _content(block_hash: bytes, table: int) -> bytes:
    """What the block of a table holds: its tokens' hash, and the table's number unless it is the first."""
    return block_hash + table.to_bytes(4, "little") if table else block_hash


def hash_blocks(request: Request, tokens: int, root: Callable[[str], bytes], block_tokens: int, lookahead: int) -> None:
    """Hash the full blocks among a sequence's first `tokens` tokens that have no hash yet, if the lookahead is known.

    Args:
        request: gets the hashes.
        tokens: how many of its tokens count.
        root: `tenant -> bytes`, the parent of the first block's hash.
        block_tokens: tokens per block.
        lookahead: tokens after a block that its hash covers too.
    """
    done = len(request.hashes) * block_tokens
    if tokens - done >= block_tokens:
        parent = request.hashes[-1] if request.hashes else root(request.tenant)
        known = request.slice(done, tokens + lookahead)
        request.hashes += block_hashes(parent, known, block_tokens, lookahead=lookahead)
