"""What rank 0 tells the others, and who is meant when several processes are there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.runner.ranks import (
    DraftCall,
    decode_draft,
    decode_queries,
    encode_batch,
    encode_draft,
    encode_queries,
    launcher_ranks,
    num_ranks,
)
from inferplane.errors import UsageError
from inferplane.types import StateSlots
from inferplane.types.batch import Query, make_batch

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
SEQUENCE = st.tuples(st.integers(1, 20), st.integers(0, 40), st.sampled_from([None, 0, 1, 3]))


@given(sequences=st.lists(SEQUENCE, min_size=1, max_size=6), data=st.data())
def test_a_batch_is_made_again_from_its_numbers(sequences, data):
    made, used = [], 0
    more_tables, has_states = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    for new, before, logits in sorted(sequences, key=lambda s: s[0] > 8):
        ids = data.draw(st.lists(st.integers(0, 2**40), min_size=new, max_size=new))
        count = -(-(new + before) // 16)
        tables = [list(range(start, start + count)) for start in range(used, used + count * (1 + more_tables), count)]
        state = StateSlots(2 * len(made) + 1, 2 * len(made) + 2) if has_states else None
        made.append(Query(ids, before, tables[0], logits, tables[1:], state))
        used += count * (1 + more_tables)
    batch = make_batch(made, block_tokens=16, device="cpu")
    message = encode_queries(made) if data.draw(st.booleans()) else encode_batch(batch, 16)
    again = make_batch(decode_queries(message), block_tokens=16, device="cpu")
    for name in ("ids", "positions", "slots", "query_start", "seq_lens", "block_tables", "logit_rows"):
        want, got = getattr(batch, name), getattr(again, name)
        assert (want is None and got is None) or torch.equal(want, got), name
    assert len(again.more_tables) == len(batch.more_tables) == more_tables
    for want_table, got_table in zip(batch.more_tables, again.more_tables):
        assert all(torch.equal(want, got) for want, got in zip(want_table, got_table))
    assert (again.states is not None) == (batch.states is not None) == has_states
    for want_slots, got_slots in zip(batch.states or (), again.states or ()):
        assert torch.equal(want_slots, got_slots)
    assert (again.kind, again.host_lens) == (batch.kind, batch.host_lens)


def test_who_was_started(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert launcher_ranks() == (0, 1, 0) and num_ranks(None) == num_ranks(1) == 1
    with pytest.raises(UsageError, match=r"tensor_parallel_size = 2, but 1 process.*nproc-per-node 2"):
        num_ranks(2)
    for name, value in zip(NAMES, ("3", "4", "1", "localhost")):
        monkeypatch.setenv(name, value)
    assert launcher_ranks() == (3, 4, 1) and num_ranks(None) == num_ranks(4) == 4 and num_ranks(1) == 1
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(UsageError, match="RANK='three'"):
        launcher_ranks()
    for rank, size in (("0", "0"), ("0", "-3"), ("-1", "2"), ("5", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(UsageError, match=f"rank {rank} of {size}"):
            launcher_ranks()


@given(
    draft=st.none() | st.builds(DraftCall, st.integers(0, 7), st.booleans(), st.lists(st.integers(0, 99)).map(tuple)),
    rest=st.lists(st.integers(-1, 99)),
)
def test_a_call_of_a_draft_layer_is_made_again_from_its_numbers(draft, rest):
    assert decode_draft([*encode_draft(draft), *rest]) == (draft, rest)
