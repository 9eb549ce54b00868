"""Layers are dealt to block tables so that a block fits each of them, and little of the cache is unused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferplane.errors import UsageError
from inferplane.kvcache import blocks_held, deal_layers, paged_layout, single_table
from inferplane.kvcache.tables import MAX_PADDING, MAX_WIDEST_PADDING, choose_width
from inferplane.types import HOST, KVRequest

FULL = KVRequest("gqa", 2, 8, 8)
SEQUENCE, BLOCK = 32_768, 64


def windowed(window):
    return replace(FULL, window=window)


def test_layers_take_the_tables_of_their_group_in_order():
    plan = deal_layers([windowed(5), windowed(5), FULL, windowed(5), windowed(5), FULL])
    assert plan.windows == (None, 5, 5)
    assert plan.table_of == (1, 1, 0, 2, 2, 0) and plan.storage_of == (0, 1, 0, 0, 1, 1)
    assert plan.storages == (FULL, FULL) and not plan.reason


def test_drafting_layers_read_the_first_table_in_storages_of_their_own():
    head = KVRequest("gqa", 4, 16, 16)
    plan = deal_layers([windowed(9), windowed(5)], [head])
    assert plan.windows == (None, 5) and plan.table_of == (0, 1, 0) and plan.storage_of == (0, 0, 1)
    assert plan.storages == (windowed(9), head)
    assert deal_layers([windowed(9), windowed(5)], [], [windowed(12)]).windows == (12, 5)


@pytest.mark.parametrize(("layers", "window"), [([FULL] * 3, None), ([windowed(4)] * 3, 4)])
def test_one_window_has_one_table(layers, window):
    plan = deal_layers(layers)
    assert (plan.windows, plan.table_of, plan.storages) == ((window,), (0,) * len(layers), tuple(layers))
    assert not plan.reason and plan.storages_by_pool() == [tuple(layers)]


NARROW, KEYS = KVRequest("gqa", 1, 8, 8), KVRequest("gqa", 1, 4, 4)


def test_groups_of_other_forms_have_pools_of_their_own():
    window = replace(NARROW, window=4)
    plan = deal_layers([window, window, FULL, window], [KEYS])
    assert plan.windows == (None, 4) and plan.pool_of == (0, 1) and not plan.reason
    assert plan.table_of == (1, 1, 0, 1, 0) and plan.storage_of == (1, 2, 0, 3, 4)
    assert plan.storages_by_pool() == [(FULL, KEYS), (window,) * 3] and plan.pool_of_storage == (0, 1, 1, 1, 0)
    assert plan.windows_by_pool() == [(None,), (4,)]
    assert [table["pool"] for table in plan.data()["tables"]] == [0, 1]


def test_groups_of_one_form_share_a_pool_beside_another():
    plan = deal_layers([FULL, windowed(9), replace(NARROW, window=4)])
    assert plan.windows == (None, 9, 4) and plan.pool_of == (0, 0, 1)
    assert plan.table_of == (0, 1, 2) and plan.storage_of == (0, 0, 1)


def test_a_group_of_several_forms_has_one_table():
    mixed = [FULL, KEYS, FULL, KEYS]
    plan = deal_layers([*mixed, windowed(4), windowed(4)])
    assert plan.windows == (None, 4) and plan.table_of == (0, 0, 0, 0, 1, 1)
    assert plan.storages_by_pool() == [tuple(mixed), (windowed(4),) * 2]


def test_a_drafting_layer_without_a_window_keeps_all_of_one_table():
    for plan in (deal_layers([windowed(4)] * 2, [FULL]), deal_layers([windowed(4)] * 2, (), [FULL])):
        assert plan.windows == (None,) and plan.reason == "a layer that drafts reads the same table and has none"
    assert not deal_layers([windowed(4)] * 2, [windowed(7)]).reason and not deal_layers([FULL], [windowed(7)]).reason
    assert single_table([windowed(4)], [windowed(7)]).windows == (7,)


MODELS = {
    "gpt-oss 20B": (12, 12, 128),
    "Gemma 3 270M": (3, 15, 512),
    "Gemma 3 1B": (4, 22, 512),
    "Gemma 3 4B": (5, 29, 1024),
    "Gemma 3 12B": (8, 40, 1024),
    "Gemma 3 27B": (10, 52, 1024),
    "OLMo 3 7B": (8, 24, 4096),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_long_sequence_holds_little_more_than_it_needs(model):
    full, window_layers, window = MODELS[model]
    plan = deal_layers([FULL] * full + [windowed(window)] * window_layers)
    held = blocks_held(plan.windows, SEQUENCE, 1, BLOCK) * BLOCK * len(plan.storages)
    needed = full * SEQUENCE + window_layers * window
    assert needed <= held <= 1.1 * needed
    of_one_table = (full + window_layers) * SEQUENCE
    assert of_one_table / held >= 0.95 * of_one_table / needed


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_padding_is_limited_and_every_layer_has_a_place(counts):
    width = choose_width(counts)
    stored = [-(-count // width) * width for count in counts]
    assert stored[0] <= (1 + MAX_WIDEST_PADDING) * counts[0] and sum(stored) <= (1 + MAX_PADDING) * sum(counts)
    layers = [windowed(1000 - group) for group, count in enumerate(counts) for _ in range(count)]
    plan = deal_layers(layers)
    assert len({*zip(plan.table_of, plan.storage_of)}) == len(layers), "two layers in one place"
    assert all(plan.windows[table] == r.window for table, r in zip(plan.table_of, layers))


@given(window=st.integers(1, 40), step=st.integers(1, 30), block=st.integers(1, 9), tokens=st.integers(1, 200))
def test_blocks_held_is_the_most_that_occurs(window, step, block, tokens):
    """Whatever the sizes of the steps: blocks for all tokens with the step's, without those that the window passed."""

    def held(first, count):
        return -(-(first + count) // block) - max(0, first + 1 - window) // block

    most = max(held(first, min(step, tokens - first)) for first in range(tokens))
    assert most == blocks_held([window], tokens, step, block) or tokens < window + step + block
    assert most <= blocks_held([window], tokens, step, block)


def test_layers_that_share_memory_see_the_same_entries():
    kv = paged_layout(4).build(FULL, 3, torch.float32, torch.device(HOST))
    kv.once("key", int)
    shared = kv.share(windowed(5))
    assert (shared.request, shared.shares, kv.shares) == (windowed(5), kv, None) and kv.request == FULL
    assert shared.once("key", lambda: 7) == 7, "what one layer remembers is not another's"
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    shared.write(torch.tensor([4, 9]), k, v)
    for got, want in zip(kv.read(torch.tensor([1, 2]), 8), (k, v)):
        assert torch.equal(got[[0, 5]], want)
    assert shared.share(FULL).shares is kv
    with pytest.raises(UsageError, match="cannot use the memory"):
        kv.share(KVRequest("gqa", 2, 8, 4))
