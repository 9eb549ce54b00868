"""The block allocator against a model of it, over random histories."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferplane.errors import CapacityError, UsageError
from inferplane.kvcache import BlockAllocator
from inferplane.kvcache.allocator import block_hashes, root_hash

TOTAL = 7
CONTENTS = st.sampled_from([bytes([i]) for i in range(5)])


class Histories(RuleBasedStateMachine):
    """Users by block, blocks by content, and the order in which blocks with a content lost their last user."""

    def __init__(self):
        super().__init__()
        self.allocator, self.users, self.holds, self.released = BlockAllocator(TOTAL), Counter(), {}, []

    @property
    def free(self):
        return [b for b in range(TOTAL) if not self.users[b] and b not in self.released]

    @property
    def used(self):
        return sorted(+self.users)

    def forget(self, block):
        self.holds = {content: b for content, b in self.holds.items() if b != block}

    @rule(count=st.integers(-1, TOTAL + 1))
    def take(self, count):
        order = [*self.free, *self.released]
        if count < 0:
            with pytest.raises(UsageError, match="-1 KV blocks"):
                self.allocator.allocate(count)
        elif count > len(order):
            with pytest.raises(CapacityError, match=rf"{count} KV blocks.*{len(order)} available of {TOTAL}"):
                self.allocator.allocate(count)
        else:
            want = order[:count]
            assert self.allocator.allocate(count) == want, "free ones, lowest first; then the longest released"
            self.users.update(want)
            for block in set(want) & set(self.released):
                self.released.remove(block)
                self.forget(block)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give_back(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.users.elements())), max_size=4))
        if any(n > self.users[b] for b, n in Counter(blocks).items()):
            with pytest.raises(UsageError, match="released twice"):
                self.allocator.release(blocks)
            return
        self.allocator.release(blocks)
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block] and block in self.holds.values():
                self.released.append(block)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), content=CONTENTS)
    def publish(self, data, content):
        block = data.draw(st.sampled_from(self.used))
        self.allocator.publish(block, content)
        if content not in self.holds and block not in self.holds.values():
            self.holds[content] = block

    @rule(contents=st.lists(CONTENTS, max_size=4, unique=True))
    def match(self, contents):
        want = []
        for content in contents:
            if content not in self.holds:
                break
            want.append(self.holds[content])
        assert self.allocator.count_prefix(contents) == len(want)
        assert self.allocator.acquire_prefix(contents) == want
        self.users.update(want)
        self.released = [b for b in self.released if b not in want]

    @rule()
    def clear(self):
        self.allocator.clear()
        for block in self.released:
            self.forget(block)
        self.released = []

    @rule(data=st.data())
    def misuse(self, data):
        unused = [b for b in range(TOTAL) if not self.users[b]]
        if not unused:
            return
        mixed = [*self.used[:2], data.draw(st.sampled_from(unused))]
        with pytest.raises(UsageError, match=f"KV block {mixed[-1]} is"):
            self.allocator.release(mixed)
        with pytest.raises(UsageError, match=f"KV block {mixed[-1]} is free"):
            self.allocator.publish(mixed[-1], b"x")

    @invariant()
    def adds_up(self):
        a = self.allocator
        a.check()
        assert (a.free, a.cached, a.used) == (len(self.free), len(self.released), len(self.used))
        assert a.available == a.free + a.cached and a.available + a.used == a.total == TOTAL
        assert [a.users(b) for b in range(TOTAL)] == [self.users[b] for b in range(TOTAL)]


TestHistories = Histories.TestCase


@pytest.mark.parametrize("total", [0, -3])
def test_a_cache_of_nothing(total):
    with pytest.raises(UsageError, match=f"cache of {total} blocks"):
        BlockAllocator(total)


def test_the_tail_of_a_prefix_is_forgotten_before_its_head():
    a = BlockAllocator(3)
    blocks = a.allocate(3)
    for block in blocks:
        a.publish(block, bytes([block]))
    a.release(blocks)
    assert a.allocate(1) == [2] and a.count_prefix([bytes([b]) for b in blocks]) == 2


def test_a_hash_covers_everything_before_it():
    root, tokens = root_hash("model", "bf16"), list(range(10))
    hashes = block_hashes(root, tokens, 4)
    assert len(hashes) == 2, "the last block is not full"
    assert hashes == block_hashes(root, tokens, 4, hashes[:1]) == block_hashes(root, tokens[:9], 4)
    others = [[9, *tokens[1:]], [*tokens[:7], 9], [2**40, *tokens[1:]], [tokens[1], tokens[0], *tokens[2:]]]
    changed = [block_hashes(root, other, 4) for other in others]
    assert all(other[1] != hashes[1] for other in changed)
    assert [other[0] == hashes[0] for other in changed] == [False, True, False, False]
    assert block_hashes(root_hash("model", "fp8"), tokens, 4)[0] != hashes[0]
    assert block_hashes(root, tokens, 5)[0] != hashes[0]
