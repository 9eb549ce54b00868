"""The ragged step: what is where, and that its two parts are what they would be alone."""

from dataclasses import fields, replace

import pytest
import torch

from inferplane.errors import UsageError
from inferplane.types.batch import FEW_TOKENS, Query, make_batch

FEW = [Query([5], 9, [3, 1, 11]), Query([6, 7, 8], 0, [2], logits=1)]
MANY = [Query(list(range(10, 20)), 4, [5, 0, 7, 9], logits=2), Query(list(range(9)), 0, [4, 6, 8], logits=0)]


def step(queries, **options):
    return make_batch(queries, **{"block_tokens": 4, "device": "cpu", **options})


def test_a_mixed_step_written_out():
    b = step([*FEW, *MANY])
    assert b.ids.tolist() == [5, 6, 7, 8, *range(10, 20), *range(9)]
    assert b.positions.tolist() == [9, 0, 1, 2, *range(4, 14), *range(9)]
    assert b.query_start.tolist() == [0, 1, 4, 14, 23] and b.seq_lens.tolist() == [10, 3, 14, 9]
    assert b.block_tables.tolist() == [[3, 1, 11, 0], [2, 0, 0, 0], [5, 0, 7, 9], [4, 6, 8, 0]]
    assert b.logit_rows.tolist() == [0, 3, 12, 13]
    assert (b.kind, b.tokens, b.max_query_tokens, b.max_seq_tokens) == ("mixed", 23, 10, 14)


def test_slots_are_block_times_size_plus_offset():
    b = step([*FEW, *MANY])
    tables = [q.blocks for q in (*FEW, *MANY)]
    starts = b.query_start.tolist()
    for i, table in enumerate(tables):
        for row in range(starts[i], starts[i + 1]):
            block, offset = divmod(int(b.positions[row]), 4)
            assert b.slots[row] == table[block] * 4 + offset
    assert b.slots[0] == 11 * 4 + 1


def test_integers_are_of_the_promised_width():
    b = step([*FEW, *MANY])
    for name in ("ids", "positions", "slots", "logit_rows"):
        assert getattr(b, name).dtype is torch.int64, name
    for name in ("query_start", "seq_lens", "block_tables"):
        assert getattr(b, name).dtype is torch.int32, name


def test_a_device_gets_one_copy_a_width_with_aligned_parts(monkeypatch):
    here = step([*FEW, *MANY])
    monkeypatch.setattr("inferplane.types.batch.HOST", "elsewhere")
    sent = step([*FEW, *MANY])
    for name in ("ids", "positions", "slots", "logit_rows", "query_start", "seq_lens", "block_tables"):
        a, b = getattr(here, name), getattr(sent, name)
        assert torch.equal(a, b) and a.dtype is b.dtype and b.is_contiguous(), name
        assert b.storage_offset() * b.element_size() % 64 == 0, name
    assert len({t.untyped_storage().data_ptr() for t in (sent.ids, sent.positions, sent.slots, sent.logit_rows)}) == 1
    assert sent.seq_lens.untyped_storage().data_ptr() == sent.block_tables.untyped_storage().data_ptr()


@pytest.mark.parametrize("part", ["few", "many"])
def test_each_part_is_the_batch_it_would_be_alone(part):
    whole = step([*FEW, *MANY])
    got, alone = getattr(whole, part), step({"few": FEW, "many": MANY}[part])
    assert got.kind == ("decode" if part == "few" else "mixed")
    for field in fields(alone):
        a, b = getattr(got, field.name), getattr(alone, field.name)
        if field.name == "block_tables":
            assert torch.equal(a[:, : b.shape[1]], b)
        elif isinstance(b, torch.Tensor) and field.name != "logit_rows":
            assert torch.equal(a, b) and a.dtype is b.dtype, field.name
        elif field.name not in ("logit_rows", "few", "many"):
            assert a == b, field.name


def test_only_many():
    whole = step(MANY)
    assert whole.few is None and whole.many.kind == "mixed" and whole.split() == (None, whole.many)
    assert torch.equal(whole.many.ids, whole.ids)


def test_only_few_is_a_decode_step():
    whole = step(FEW)
    assert whole.kind == "decode" and whole.split() == (whole, None) and whole.few is None and whole.many is None


def test_the_bound_of_few():
    exactly = Query(list(range(FEW_TOKENS)), 0, [0, 1])
    more = Query(list(range(FEW_TOKENS + 1)), 0, [2, 3, 4])
    assert step([exactly]).kind == "decode" and step([more]).kind == "mixed"
    assert step([exactly], few_tokens=1).kind == "mixed"


@pytest.mark.parametrize(("wanted", "rows"), [(None, None), (0, []), (1, [2]), (2, [1, 2]), (9, None)])
def test_rows_that_want_logits(wanted, rows):
    b = step([Query([1, 2, 3], 0, [0], wanted)])
    assert (None if b.logit_rows is None else b.logit_rows.tolist()) == rows
    if rows is not None:
        assert torch.arange(3.0).index_select(0, b.logit_rows).tolist() == rows, "usable as an index, also when empty"


def test_rows_of_a_batch():
    b = step([*FEW, *MANY])
    assert [(r.start, r.stop, r.tokens) for r in b.rows()] == [(0, 1, 10), (1, 4, 3), (4, 14, 14), (14, 23, 9)]
    assert [r.table.tolist() for r in b.rows()] == b.block_tables.tolist()


@pytest.mark.parametrize("known", [True, False])
def test_padded_sequences_have_no_row(known):
    b = step(FEW)
    padded = replace(
        b,
        ids=torch.cat((b.ids, torch.zeros(2, dtype=torch.int64))),
        slots=torch.cat((b.slots, torch.tensor([-1, -1]))),
        query_start=torch.cat((b.query_start, torch.tensor([5, 6], dtype=torch.int32))),
        seq_lens=torch.cat((b.seq_lens, torch.tensor([0, 0], dtype=torch.int32))),
        block_tables=torch.cat((b.block_tables, torch.zeros(2, 3, dtype=torch.int32))),
        host_lens=None,
    )
    if known:
        padded = replace(padded, host_lens=padded.lens())
    assert padded.tokens == 6 and padded.lens().seq_lens == (10, 3, 0, 0)
    assert [(r.start, r.stop, r.tokens) for r in padded.rows()] == [(0, 1, 10), (1, 4, 3)]


def test_lens_come_from_the_device_when_the_host_runs_behind():
    b = step([*FEW, *MANY])
    assert replace(b, host_lens=None).lens() == b.lens()


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        ([], "without sequences"),
        ([Query([], 3, [0])], "Sequence 0 of the batch has no new tokens"),
        ([MANY[0], FEW[1]], r"Sequence 1 has 3 new tokens but comes after one with 10.*few tokens first"),
        ([Query([1], 8, [0, 1])], "Sequence 0 has 2 blocks of 4 tokens for 9 tokens"),
    ],
)
def test_batches_that_cannot_be(queries, words):
    with pytest.raises(UsageError, match=words):
        step(queries)


# ------------------------------------------------------------------ several block tables


def with_tables(queries, shift):
    """Queries with two further tables, whose blocks are those of the first moved by `shift` and by twice that."""
    return [replace(q, more_blocks=[[b + shift for b in q.blocks], [b + 2 * shift for b in q.blocks]]) for q in queries]


@pytest.mark.parametrize("queries", [FEW, MANY, [*FEW, *MANY]])
def test_each_table_sees_the_step_that_it_would_see_alone(queries):
    batch = step(with_tables(queries, 20))
    for number in range(3):
        alone = step([replace(q, blocks=[b + 20 * number for b in q.blocks]) for q in queries])
        view = batch.for_table(number)
        for ours, theirs in zip((view, *view.split()), (alone, *alone.split())):
            assert (ours is None) == (theirs is None)
            for f in fields(alone) if ours is not None and theirs is not None else ():
                a, b = getattr(ours, f.name), getattr(theirs, f.name)
                if isinstance(a, torch.Tensor):
                    assert torch.equal(a, b), f.name
                elif f.name not in ("few", "many", "more_tables"):
                    assert a == b, f.name
    assert batch.for_table(0) is batch and batch.for_table(2) is batch.for_table(2)
    assert batch.for_table(1).slots.tolist() == (batch.slots + 20 * 4).tolist()


def test_a_changed_batch_changes_what_its_tables_see():
    batch = step(with_tables(FEW, 20))
    assert batch.for_table(1).ids is batch.ids
    moved = replace(batch, ids=batch.ids + 1)
    assert torch.equal(moved.for_table(1).ids, batch.ids + 1)


def test_tables_that_do_not_fit_are_refused():
    one, two = with_tables(FEW, 20)
    for queries in ([one, FEW[1]], [FEW[0], two], [one, replace(two, more_blocks=[two.more_blocks[0], []])]):
        with pytest.raises(UsageError, match="further block tables"):
            step(queries)
    with pytest.raises(UsageError, match="reads block table 3"):
        step([one, two]).for_table(3)
