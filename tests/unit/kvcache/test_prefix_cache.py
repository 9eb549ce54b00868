"""Blocks that are found again: who may share them, what is left to compute, which go first, how they are named."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.request.params import SamplingParams
from inferplane.kvcache.allocator import block_hashes, root_hash
from tests.unit.engine.loop.test_steps import greedy, some
from tests.unit.support.fake_model import V, engine, right

LONG = some(1, 1000, seed=5)[0]


def rows_of(e, prompt, params=None, **more):
    """A request run to its end alone, and the token rows that took."""
    before = e.runner.rows
    r = e.add(prompt, params or greedy(1), **more)
    e.finish()
    assert right(r)
    return r, e.runner.rows - before


# ------------------------------------------------------------------ bar k


def test_a_second_request_computes_only_its_tail():
    e = engine(400, block_tokens=16)
    assert rows_of(e, [*LONG, 1, 2, 3])[1] == 1003
    for tail, rows in (([4, 5, 6], 11), ([1, 2, 3], 11), ([], 8), ([9] * 30, 38)):  # 62 blocks hold 992 tokens
        r, computed = rows_of(e, [*LONG, *tail])
        assert (computed, r.cached_tokens, r.timings().cached_tokens) == (rows, 992, 992)
    s = e.stats()
    assert s["prefix_cache_hits_total"] == 4 * 992 and s["prefix_cache_queries_total"] == 2 * 1003 + 1000 + 1030 + 1003


def test_also_while_the_first_one_runs():
    e = engine(400, block_tokens=16)
    first = e.add(LONG, greedy(30))
    for _ in range(20):  # 16 chunks of 64 tokens
        e.step()
    second = e.add([*LONG, 7], greedy(5))
    e.step()
    assert second.cached_tokens == 992 and second.blocks[:62] == first.blocks[:62]
    assert [e.pools.first.users(b) for b in second.blocks[:62]] == [2] * 62
    e.end(first, "abort")  # the other one keeps what it shares
    e.finish()
    assert right(second) and e.pools.used == 0


def test_at_least_one_token_is_computed():
    """A prompt of full blocks only: the last one is computed again, for its logits."""
    e = engine(64)
    assert rows_of(e, [1, 2, 3, 4] * 2)[1] == 8
    assert rows_of(e, [1, 2, 3, 4] * 2)[1] == 4


def test_other_tenants_and_facts_share_nothing():
    e = engine(400, block_tokens=16)
    assert rows_of(e, LONG, tenant="a")[1] == 1000
    assert rows_of(e, LONG, tenant="b")[1] == rows_of(e, LONG)[1] == 1000
    assert rows_of(e, LONG, tenant="a")[1] == 8
    hashes = {
        root_hash(*facts) for facts in (("m", "f32", "auto", ""), ("n", "f32", "auto", ""), ("m", "bf16", "auto", ""))
    }
    assert len({*hashes, root_hash("m", "f32", "fp8", ""), root_hash("m", "f32", "auto", "x")}) == 5
    assert root_hash("a", "b") != root_hash("ab", "") != root_hash("", "ab")


def test_switched_off():
    e = engine(400, block_tokens=16, enable_prefix_caching=False)
    assert rows_of(e, LONG)[1] == rows_of(e, LONG)[1] == 1000 and e.pools.cached == 0


def test_prompt_logprobs_need_every_row():
    """What asks for them takes nothing from the cache, and leaves its blocks to others."""
    e = engine(64)
    prompt = LONG[:40]
    asks = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=2)
    for _ in range(2):
        r, rows = rows_of(e, prompt, asks)
        assert rows == 40 and len(r.prompt_logprobs) == 40 and r.prompt_logprobs[0] is None
        assert [x.token_id for x in r.prompt_logprobs[1:]] == prompt[1:]
    assert rows_of(e, prompt)[1] == 4


def test_a_changed_token_ends_the_match():
    e = engine(64)
    rows_of(e, LONG[:40])
    for at in range(40):
        other = [*LONG[:at], (LONG[at] + 1) % V, *LONG[at + 1 : 40], 1]
        assert rows_of(e, other)[0].cached_tokens == at // 4 * 4
        e.pools.clear()
        rows_of(e, LONG[:40])


# ------------------------------------------------------------------ generated tokens, drafts, eviction


@pytest.mark.parametrize("script", [None, "right", "wrong", "alternate", "junk"])
def test_what_was_generated_is_found_too(script):
    e = engine(64, script=script)
    first, _ = rows_of(e, [1, 2, 3], greedy(22))
    follow, rows = rows_of(e, [1, 2, 3, *first.generated, 8])
    assert follow.cached_tokens == 24 and rows == 2  # the 25th token, its last, was never written
    e.pools.check()


@pytest.mark.parametrize("script", ["wrong", "alternate", "junk"])
def test_no_refused_draft_is_published(script):
    """Every block that is found holds what its name says: a second run over the same text gets the same tokens."""
    draw = random.Random(0)
    e = engine(40, block_tokens=2, script=script, drafts=5)
    for _ in range(40):
        prompt = [3, 1, 4, 1, 5][: draw.randrange(1, 6)]
        rows_of(e, prompt, greedy(draw.randrange(1, 24)))


def test_the_longest_unused_goes_first_and_tails_before_heads():
    e = engine(10, block_tokens=4)
    a, b, c = some(3, 16, seed=2)
    rows_of(e, a)  # 4 blocks each
    rows_of(e, b)
    assert rows_of(e, [*a, 1])[0].cached_tokens == 16  # used again: b is now the older one
    rows_of(e, c)  # needs 4; 1 block never held anything, 1 the tail of [*a, 1]
    assert e.pools.first.count_prefix(hashes(e, b)) == 2, "its tail went, its head is left"
    assert e.pools.first.count_prefix(hashes(e, a)) == e.pools.first.count_prefix(hashes(e, c)) == 4
    assert rows_of(e, [*b, 1])[0].cached_tokens == 8


def hashes(e, prompt):
    return block_hashes(e.scheduler.root(""), prompt, e.cache.block_tokens)


def test_a_sequence_that_waits_holds_no_blocks():
    e = engine(10)
    rows_of(e, LONG[:32])
    hog = e.add(some(1, 30, seed=8)[0], greedy(10))
    e.step()
    late = e.add([*LONG[:32], 1], greedy(1))
    for _ in range(3):
        e.step()
        assert not late.blocks and late in e.scheduler.waiting
    e.finish()
    assert right(hog) and right(late)


# ------------------------------------------------------------------ names

TOKENS = st.lists(st.integers(0, 2**31), max_size=24)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_equal_names_mean_equal_beginnings(a, b, n):
    one, two = block_hashes(b"r", a, n), block_hashes(b"r", b, n)
    assert len(one) == len(a) // n and len({*one}) == len(one)
    for i, (x, y) in enumerate(zip(one, two)):
        assert (x == y) == (a[: (i + 1) * n] == b[: (i + 1) * n])


@given(TOKENS, st.integers(0, 24), st.integers(1, 5))
def test_names_grow_with_the_text(tokens, cut, n):
    whole = block_hashes(b"r", tokens, n)
    part = block_hashes(b"r", tokens[:cut], n)
    assert whole[: len(part)] == part and block_hashes(b"r", tokens, n, part) == whole
    assert not {*whole} & {*block_hashes(b"s", tokens, n)}


def test_a_hash_may_cover_what_follows():
    """With lookahead a block is another one when another token follows, and none while nothing does."""
    root = root_hash("m")
    known = block_hashes(root, LONG[:12], 4, lookahead=1)
    assert len(known) == 2 and len(block_hashes(root, LONG[:13], 4, lookahead=1)) == 3
    other = block_hashes(root, [*LONG[:8], LONG[8] + 1], 4, lookahead=1)
    assert other[0] == known[0] and other[1] != known[1]
    assert block_hashes(root, [*LONG[:8], LONG[8] + 1], 4) == block_hashes(root, LONG[:8], 4)
    assert known[0] != block_hashes(root, LONG[:8], 4)[0], "the two ways are never mixed up"
