"""Verification and chains of drafts as devices record them: traced once without values, replayed on others.

torch's tracer runs them on tensors without contents, where whatever the host would read raises, and its graph computes
from its inputs alone: a value that was baked in shows as another result.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from inferplane.engine.speculate import SpeculativeConfig
from inferplane.engine.speculate.network import draft_tokens, next_token_batch
from inferplane.engine.speculate.verify import DraftTable, draft_table, verify_on_device
from inferplane.types import Batch
from inferplane.types.batch import HostLens, Query, make_batch

V, B, D, BLOCK, WIDTH = 40, 6, 3, 4, 8
STRATEGIES = ["rejection", "target_match", "greedy", "topp"]
NAMES = ("ids", "positions", "slots", "query_start", "seq_lens", "block_tables")


def recorded(function, *inputs):
    """Constants, as weights are, stay what they were; everything else is an input."""
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def case(seed):
    """Inputs of `verify_on_device` for B sequences with D rows of drafts, some of them used; drafts are often right."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, D + 1, (B,), generator=g)
    rows = B * (1 + D)
    p = (torch.randn(rows, V, generator=g) * 4).softmax(-1)
    drawn = torch.where(torch.rand(rows, generator=g) < 0.7, p.argmax(-1), torch.randint(0, V, (rows,), generator=g))
    starts = (1 + lengths).cumsum(0) - 1 - lengths
    at = (starts[:, None] + torch.arange(D)).clamp(max=rows - 1)
    wrong = torch.rand(B, D, generator=g) < 0.3
    tokens = torch.where(wrong, torch.randint(0, V, (B, D), generator=g), drawn[at])
    return drawn, tokens, lengths, starts, p, torch.rand(rows, 2, generator=g)


@pytest.mark.parametrize("policy", ["normal", "accept_all", "reject_all"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_verification_can_be_recorded(strategy, policy):
    config = SpeculativeConfig("ngram", verify_strategy=strategy, accept_policy=policy)

    def step(drawn, tokens, lengths, starts, p, uniforms):
        got = verify_on_device(drawn, DraftTable(tokens, lengths, starts), config, p, uniforms)
        return got.tokens, got.counts

    graph, outcomes = recorded(step, *case(0)), set()
    for seed in range(1, 30):
        inputs = case(seed)
        for got, want in zip(graph(*inputs), step(*inputs)):
            assert torch.equal(got, want)
        tokens, counts = step(*inputs)
        outcomes.add((*tokens[:, 0].tolist(), *counts.tolist()))
    assert len(outcomes) == 29, "the cases hardly differ"


def test_what_the_host_would_read_is_found():
    """Both faults that the tests here are for: a value read while recording, and one read before."""
    config = SpeculativeConfig("ngram", verify_strategy="target_match")

    def reads(drawn, tokens, lengths, starts, p, uniforms):
        got = verify_on_device(drawn, DraftTable(tokens, lengths, starts), config, p, uniforms)
        return got.tokens[:, : int(got.counts.max())]

    with pytest.raises(GuardOnDataDependentSymNode):
        recorded(reads, *case(0))
    known = case(0)[2]

    def bakes(drawn, tokens, lengths, starts, p, uniforms):
        return verify_on_device(
            drawn, DraftTable(tokens, torch.tensor(known.tolist()), starts), config, p, uniforms
        ).counts

    def right(drawn, tokens, lengths, starts, p, uniforms):
        return verify_on_device(drawn, DraftTable(tokens, lengths, starts), config, p, uniforms).counts

    graph = recorded(bakes, *case(0))
    assert any(not torch.equal(graph(*case(seed)), right(*case(seed))) for seed in range(1, 30))


def test_lists_of_drafts_lie_as_rows_do():
    got = draft_table([[4, 5, 6], [], [8]], torch.device("cpu"))
    assert got.tokens[0].tolist() == [4, 5, 6] and got.tokens[2, 0] == 8
    assert got.lengths.tolist() == [3, 0, 1] and got.starts.tolist() == [0, 4, 5]
    assert draft_table([[], []], torch.device("cpu")).tokens.shape == (2, 0)


# ------------------------------------------------------------------ chains of drafts

TABLE = torch.randn(V, 5, generator=torch.Generator().manual_seed(3))
HEAD = torch.randn(5, V, generator=torch.Generator().manual_seed(4))


def forward_over(kv):
    """Writes an entry for each row and looks at all before it: a network in miniature, in tensors alone."""

    def forward(batch: Batch, hidden):
        x = TABLE[batch.ids] + hidden.tanh() + batch.positions[:, None] / 50
        kv.index_put_((torch.where(batch.slots < 0, kv.shape[0] - 1, batch.slots),), x)
        at = torch.arange(WIDTH * BLOCK)
        places = batch.block_tables.long()[:, at // BLOCK] * BLOCK + at % BLOCK
        seen = kv[places] * (at < batch.seq_lens[:, None])[..., None]
        hidden = x + seen.sum(1)
        return hidden @ HEAD, hidden

    return forward


def situation(seed):
    """B sequences over scattered blocks, how many drafts each wants, and a cache whose last row is for padding."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, WIDTH * BLOCK - D, (B,), generator=g)
    blocks = torch.randperm(B * WIDTH, generator=g).view(B, WIDTH)
    lengths = torch.randint(1, D + 2, (B,), generator=g)
    lengths[0] = D + 1
    tokens, hidden = torch.randint(0, V, (B,), generator=g), torch.randn(B, 5, generator=g)
    return ends, blocks, lengths, tokens, hidden, torch.randn(B * WIDTH * BLOCK + 1, 5, generator=g)


def batch_of(ends, blocks, ids=None):
    queries = [
        Query([0 if ids is None else int(ids[i])], int(end) - 1, blocks[i].tolist()) for i, end in enumerate(ends)
    ]
    return make_batch(queries, block_tokens=BLOCK, device="cpu")


def one_by_one(ends, blocks, lengths, tokens, hidden, kv):
    """Each sequence alone, its batches made on the host."""
    out = []
    for i in range(B):
        drafts, state, token = [int(tokens[i])], hidden[i : i + 1], tokens[i : i + 1]
        for done in range(1, int(lengths[i])):
            batch = batch_of([ends[i] + done], blocks[i : i + 1], token)
            logits, state = forward_over(kv)(batch, state)
            token = logits.argmax(-1)
            drafts.append(int(token))
        out.append(drafts)
    return out


def run_chain(tokens, hidden, lengths, kv, *tensors):
    batch = Batch(
        **dict(zip(NAMES, tensors)), logit_rows=None, kind="decode", max_query_tokens=1, max_seq_tokens=WIDTH * BLOCK
    )
    return draft_tokens(forward_over(kv), tokens, hidden, batch, lengths, D + 1, BLOCK), kv


def chain_inputs(seed):
    ends, blocks, lengths, tokens, hidden, kv = situation(seed)
    batch = batch_of(ends, blocks)
    return tokens, hidden, lengths, kv, *(getattr(batch, name) for name in NAMES)


def test_a_chain_can_be_recorded():
    """And gives each sequence the drafts that it gets alone; who wants fewer writes nothing further."""
    graph = recorded(run_chain, *chain_inputs(0))
    for seed in range(1, 12):
        ends, blocks, lengths, tokens, hidden, alone = situation(seed)
        want = one_by_one(ends, blocks, lengths, tokens, hidden, alone)
        for run in (graph, run_chain):
            got, kv = run(*chain_inputs(seed))
            assert [row[:n] for row, n in zip(got.tolist(), lengths.tolist())] == want
            assert torch.allclose(kv[:-1], alone[:-1], atol=1e-5)


def test_the_batch_behind_is_the_one_that_the_host_would_make():
    ends, blocks, *_, tokens, _, _ = situation(5)
    live = torch.tensor([True] * (B - 1) + [False])
    got = next_token_batch(batch_of(ends, blocks), tokens, live, BLOCK)
    want = batch_of(ends + 1, blocks, tokens)
    for name in NAMES:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype
        last = -1 if name == "slots" else 0 if name == "seq_lens" else None
        if last is not None:
            assert mine[-1] == last
            mine, theirs = mine[:-1], theirs[:-1]
        assert torch.equal(mine, theirs), name
    assert got.host_lens is None


def test_a_chain_tells_the_lengths_that_the_host_knows():
    ends, blocks, _, tokens, hidden, kv = situation(6)
    told = []

    def forward(batch, states):
        told.append(batch.lens())
        assert batch.lens().seq_lens == tuple(batch.seq_lens.tolist())
        return forward_over(kv)(batch, states)

    starts = tuple(range(B + 1))
    lens = [HostLens(starts, tuple((ends + done).tolist())) for done in range(1, D + 1)]
    draft_tokens(forward, tokens, hidden, batch_of(ends, blocks), torch.full((B,), D + 1), D + 1, BLOCK, lens)
    assert told == lens
