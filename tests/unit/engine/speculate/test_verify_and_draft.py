"""Cycles as devices record them: traced once without values, replayed on others, against each sequence by itself."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import FULL, GREEDY, PLAIN, SHORT, BatchRow, sampling_kind
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.speculate import SpeculativeConfig, needs_probabilities, verify
from inferplane.engine.speculate.captured import verify_and_draft as cycle
from inferplane.engine.speculate.captured.verify_and_draft import CaptureForm, StepTensors, VerifyAndDraft
from inferplane.engine.speculate.network import draft_tokens
from inferplane.ops import SampleTokens
from inferplane.types import Batch
from inferplane.types.batch import Query, make_batch
from tests.unit.support.small import bound

V, B, T, MOST, BLOCK, WIDTH = 40, 6, 4, 3, 4, 9
NAMES = ("ids", "positions", "slots", "query_start", "seq_lens", "block_tables")
TABLE = torch.randn(V, 5, generator=torch.Generator().manual_seed(3))
HEADS = torch.randn(2, 5, V, generator=torch.Generator().manual_seed(4))
SAMPLER = Sampler(bound(SampleTokens()), V, "cpu")
ASKED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.9, top_k=4),
    SamplingParams(temperature=1.1, top_p=0.8, min_p=0.02),
]


def network(kv, head):
    """Writes an entry for each row, and looks at those up to its own as counted from the end of its sequence."""

    def forward(batch: Batch, hidden=None):
        x = TABLE[batch.ids] + batch.positions[:, None] / 50 + (0 if hidden is None else hidden.tanh())
        slots = torch.where(batch.slots < 0, kv.shape[0] - 1, batch.slots)
        kv.index_put_((slots.flip(0),), x.flip(0))  # first rows last, as a device may: nobody writes where another does
        of = torch.searchsorted(batch.query_start[1:].long(), torch.arange(x.shape[0]), right=True)
        at = torch.arange(WIDTH * BLOCK)
        places = batch.block_tables.long()[of][:, at // BLOCK] * BLOCK + at % BLOCK
        last = batch.seq_lens[of] - (batch.query_start[of + 1] - torch.arange(x.shape[0]))
        hidden = x + (kv[places] * (at <= last[:, None])[..., None]).sum(1).tanh()
        logits = hidden @ head
        return logits if batch.logit_rows is None else logits[batch.logit_rows], hidden

    return forward


def situation(seed, kinds):
    """Sequences over scattered blocks with some drafts, often the tokens that would come; caches full of leftovers."""
    g = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape):
        return torch.randint(low, high, shape or (B,), generator=g)

    asked = [p for p in ASKED if sampling_kind(p, V) in kinds]
    before, rows = ints(T, WIDTH * BLOCK - T - MOST), ints(1, T + 1)
    rows[int(ints(0, B, 1))] = 0
    there = (rows > 0).long()
    blocks = torch.randperm(B * WIDTH, generator=g).view(B, WIDTH)
    return {
        "before": before, "rows": rows, "blocks": blocks, "ids": ints(0, V, B, T), "seed": ints(-9, 9),
        "generated": ints(1, 50), "params": [asked[int(i)] for i in ints(0, len(asked))],
        "after_all": there * ints(1, MOST + 1), "after_some": there * ints(1, MOST + 1),
        "room": there * ints(T - 1, T + MOST + 1),
        "kv": torch.randn(2, B * WIDTH * BLOCK + 1, 5, generator=g),
    }  # fmt: skip


def guess(case, config):
    """Make some drafts right, as far as the model alone tells: the first ones that plain sampling gives."""
    for i in range(B):
        for done in range(1, int(case["rows"][i])):
            if (done + i) % 4:
                tokens = alone({**case, "kv": case["kv"].clone()}, i, done, config)[0]
                case["ids"][i, done] = tokens[-1] if len(tokens) == done else case["ids"][i, done]


def alone(case, i, rows, config):
    """New tokens, drafts and how many were wanted, of one sequence by itself, lengths and drafts known to the host."""
    ids, params, before = case["ids"][i, :rows].tolist(), case["params"][i], int(case["before"][i])
    generated, seed = int(case["generated"][i]), int(case["seed"][i])
    blocks = case["blocks"][i].tolist()
    main, layer = (network(kv, head) for kv, head in zip(case["kv"], HEADS))
    logits, hidden = main(make_batch([Query(ids, before, blocks)], block_tokens=BLOCK, device="cpu"))
    step = SAMPLER.prepare([BatchRow(params, seed, generated + k, None, ids[1 : 1 + k]) for k in range(rows)])
    p = uniforms = None
    if needs_probabilities(config) and params.temperature:
        p = SAMPLER.probabilities(logits, step)
        uniforms = torch.stack([rng.uniform(step.seeds, step.positions, stream) for stream in (1, 2)], 1)
    got = verify(SAMPLER.sample(logits, step), [ids[1:]], config, p, uniforms)
    stood = int(got.counts[0])
    tokens = got.tokens[0, :stood].tolist()
    wanted = int(min(case["after_all" if stood == rows else "after_some"][i], case["room"][i] - stood))
    standing = make_batch([Query(tokens, before, blocks, 1)], block_tokens=BLOCK, device="cpu")
    logits, states = layer(standing, hidden[:stood])
    if wanted < 1:
        return tokens, [], wanted
    last = make_batch([Query(tokens[-1:], before + stood - 1, blocks)], block_tokens=BLOCK, device="cpu")
    found = draft_tokens(layer, logits.argmax(-1), states[-1:], last, torch.tensor([wanted]), wanted, BLOCK)
    return tokens, found[0].tolist(), wanted


def inputs(case):
    """As `CapturedSteps` packs them: a sequence's rows stand last in its T."""
    n, rows = case["before"], case["rows"]
    place = torch.arange(T) - (T - rows)[:, None]
    real, positions = place >= 0, (n[:, None] + place).clamp(min=0)
    slots = case["blocks"].gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
    tensors = (
        torch.where(real, case["ids"].gather(1, place.clamp(min=0)), 0).view(-1),
        torch.where(real, positions, 0).view(-1),
        torch.where(real, slots, -1).view(-1),
        torch.arange(0, B * T + 1, T, dtype=torch.int32),
        torch.where(rows > 0, n + rows, 0).int(),
        case["blocks"].int(),
    )
    p = case["params"]
    numbers = (
        rows, case["after_all"], case["after_some"], case["room"],
        torch.tensor([sampling_kind(x, V) for x in p]), case["seed"],
        case["generated"], torch.tensor([x.top_k for x in p]), torch.tensor([x.temperature or 1.0 for x in p]),
        torch.tensor([x.top_p for x in p]), torch.tensor([x.min_p for x in p]),
    )  # fmt: skip
    return (*tensors, *numbers, case["kv"])


def cycle_over(config, form):
    def run(*tensors):
        (kv, *_), (batch, numbers) = tensors[::-1], (tensors[:6], tensors[6:-1])
        main, layer = (network(x, head) for x, head in zip(kv.unbind(0), HEADS))
        given = Batch(**dict(zip(NAMES, batch)), logit_rows=None, kind="decode", max_query_tokens=T, max_seq_tokens=36)
        return VerifyAndDraft(main, layer, SAMPLER, config, BLOCK)(StepTensors(given, *numbers), form), kv

    return run


@pytest.mark.parametrize("kinds", [(GREEDY,), (PLAIN,), (GREEDY, PLAIN, SHORT, FULL)])
@pytest.mark.parametrize("strategy", ["rejection", "target_match", "topp"])
def test_a_recorded_cycle_gives_each_sequence_what_it_gets_alone(strategy, kinds):
    """New tokens, drafts, and the entries of both networks; its inputs alone tell a replay what is new."""
    config = SpeculativeConfig("mtp", verify_strategy=strategy)
    run, graph, counts = cycle_over(config, CaptureForm(MOST, kinds)), None, set()
    for seed in range(6):
        case = situation(seed, kinds)
        guess(case, config)
        given = inputs(case)
        if graph is None:  # SHORT and FULL rows are sorted by numpy on a host, which a tracer cannot see into
            sorts = bool({SHORT, FULL} & {*kinds})
            graph = run if sorts else make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        mine = {**case, "kv": case["kv"].clone()}
        table, kv = graph(*given)
        for i in range(B):
            rows, row = int(case["rows"][i]), table[i].tolist()
            if not rows:
                assert row[0] == 0
                continue
            tokens, drafts, wanted = alone(mine, i, rows, config)
            assert (row[0], row[1], row[2 : 2 + row[0]]) == (len(tokens), 1, tokens)
            assert row[2 + T : 2 + T + max(0, wanted)] == drafts
            counts.add((rows, len(tokens)))
        assert torch.allclose(kv[:, :-1], mine["kv"][:, :-1], atol=1e-5), "entries of padding, or of drafts not wanted"
    assert len(counts) > 6, "sequences hardly differ"


@pytest.mark.parametrize("kinds", [(GREEDY,), (PLAIN,), (GREEDY, PLAIN, SHORT, FULL)])
def test_no_more_rows_are_drawn_at_once_than_a_device_takes(kinds, monkeypatch):
    case, config, form = situation(2, kinds), SpeculativeConfig("mtp"), CaptureForm(MOST, kinds)
    want, _ = cycle_over(config, form)(*inputs({**case, "kv": case["kv"].clone()}))
    monkeypatch.setattr(cycle, "DEVICE_ENTRIES", 5 * V)
    sizes, plain = [], Sampler._draw
    monkeypatch.setattr(Sampler, "_draw", lambda self, x, group: sizes.append(len(x)) or plain(self, x, group))
    table, _ = cycle_over(config, form)(*inputs(case))
    assert sizes == [5, 5, 5, 5, 4] * len(kinds) and torch.equal(table, want)


def test_rows_that_are_not_finite_are_told():
    config = SpeculativeConfig("mtp", verify_strategy="target_match")
    case = situation(1, (GREEDY,))
    padded = int((case["rows"] == 0).nonzero()[0, 0])
    broken = (padded + 1) % B
    case["kv"][0, case["blocks"][broken, 0] * BLOCK] = torch.nan
    case["kv"][0, case["blocks"][padded, 0] * BLOCK] = torch.nan
    table, _ = cycle_over(config, CaptureForm(1, (GREEDY,)))(*inputs(case))
    assert table[:, 1].tolist() == [int(i != broken) for i in range(B)], "padding shows nothing"
