"""The sampler against transformers' processors, formulas by hand, statistics, and itself in other batches."""

import random

import numpy as np
import pytest
import torch

from inferplane.engine.request.history import History
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import FULL, GREEDY, PLAIN, SHORT, BatchRow
from inferplane.engine.sampling.sampler import Sampler, draw
from inferplane.ops import SampleTokens
from inferplane.types import HOST
from tests.unit.support.small import bound
from tests.unit.support.splitmix import uniform_scalar

V = 300
ENDS = frozenset({7, 40})


def sampler(vocab=V):
    return Sampler(bound(SampleTokens()), vocab, HOST)


def row(params, prompt=(), generated=(), drafts=(), seed=0, **options):
    history = History(prompt, generated) if params.penalizes else None
    position = len(generated) + len(drafts)
    return BatchRow(params, seed, position, history, tuple(drafts), options.pop("ends", ENDS), **options)


def some_params(r, **fixed):
    """Any combination of what can be asked for, each thing half of the time."""
    asked = {
        "temperature": r.uniform(0.05, 3),
        "top_k": r.choice([1, 2, 5, 20, 74, 76, 200, 299, 300, 400]),
        "top_p": r.uniform(0.02, 0.999),
        "min_p": r.uniform(0.001, 0.5),
        "repetition_penalty": r.uniform(0.5, 2),
        "min_tokens": r.randint(0, 12),
    }
    return SamplingParams(**{"max_tokens": 100, **{k: v for k, v in asked.items() if r.random() < 0.5}, **fixed})


def bits(tokens, vocab=V):
    words = np.zeros(-(-vocab // 32), np.uint32)
    for t in tokens:
        words[t // 32] |= np.uint32(1 << (t % 32))
    return words.view(np.int32)


def many_rows(count, seed=0):
    """Rows that ask for everything there is, alone and together."""
    r, rows = random.Random(seed), []
    for i in range(count):
        extra = {
            "temperature": r.choice([0.0, 0.3, 1.0, 1.7]),
            "frequency_penalty": r.choice([0, 0, 0.7]),
            "presence_penalty": r.choice([0, 0, -0.4]),
            "logit_bias": r.choice([{}, {}, {3: 4.0, 299: -100}]),
            "logprobs": r.choice([None, None, 0, 3]),
        }
        words = {"allowed": bits(r.sample(range(V), 30))} if r.random() < 0.3 else {}
        prompt, made = r.choices(range(V), k=r.randint(1, 40)), r.choices(range(V), k=r.randint(0, 20))
        rows.append(row(some_params(r, **extra), prompt, made, made[: i % 3], i % 5, **words))
    return rows


def transformers_distribution(logits, params, prompt, generated):
    from transformers.generation import logits_process as lp

    steps = []
    if params.repetition_penalty != 1:
        steps.append(lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        steps.append(lp.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, sorted(ENDS), HOST))
    if params.temperature != 1:
        steps.append(lp.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(lp.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(lp.MinPLogitsWarper(params.min_p))
    return lp.LogitsProcessorList(steps)(torch.tensor([[*prompt, *generated]]), logits[None].clone())[0].softmax(-1)


def test_processors_are_those_of_transformers():
    """1,000 random cases (item 3, bar j): the same tokens can come, with the same probabilities."""
    r, ours, kinds = random.Random(5), sampler(), set()
    for _ in range(20):
        logits = torch.randn(50, V) * r.uniform(0.5, 6)
        cases = []
        for _ in range(50):
            prompt, made = r.choices(range(V), k=r.randint(1, 60)), r.choices(range(V), k=r.randint(0, 20))
            cases.append((some_params(r), prompt, made))
        step = ours.prepare([row(*case) for case in cases])
        kinds |= {g.kind for g in step.groups}
        got = ours.probabilities(logits, step)
        for p, x, case in zip(got, logits, cases):
            want = transformers_distribution(x, *case)
            assert not (((p > 0) != (want > 0)) & (torch.maximum(p, want) > 1e-9)).any(), case
            assert (p - want).abs().max() < 2e-6, case
    assert kinds == {PLAIN, SHORT, FULL}


def test_penalties_by_hand():
    prompt, made, drafts = [1, 2, 2, 3], [3, 4, 4, 5], [4, 9]
    p = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={4: 2.5, 0: -1}
    )
    x = torch.randn(1, V)
    x[0, 1], x[0, 3] = -0.0, -2.0
    want = x[0].double().tolist()
    for t in {1, 2, 3, 4, 5, 9}:
        want[t] = want[t] * 1.3 if want[t] < 0 else want[t] / 1.3
    for t, times in {3: 1, 4: 3, 5: 1, 9: 1}.items():
        want[t] = want[t] - times * 0.5 + 0.25
    want[4], want[0] = want[4] + 2.5, want[0] - 1
    kept = x.clone()
    ours = sampler()
    got = ours.process(x, ours.prepare([row(p, prompt, made, drafts)]))
    assert torch.allclose(got[0].double(), torch.tensor(want).double(), atol=1e-6) and torch.equal(x, kept)


def test_a_history_grows_as_the_text_does():
    r = random.Random(2)
    prompt, made = r.choices(range(50), k=30), r.choices(range(90), k=200)
    grown = History(prompt)
    for i, token in enumerate(made):
        grown.extend([token])
        if i % 37 == 0:
            drafts = r.choices(range(99), k=4)
            for ahead in ([], drafts):
                ids, counts = grown.counts(ahead)
                past = made[: i + 1] + ahead
                assert dict(zip(ids.tolist(), counts.tolist())) == {t: past.count(t) for t in {*prompt, *past}}
    ids, counts = History([], [8]).counts()
    assert ids.tolist() == [8] and counts.tolist() == [1]


def support(params, logits=None, **options):
    ours = sampler()
    x = torch.randn(1, V) if logits is None else logits
    return set(ours.probabilities(x, ours.prepare([row(params, **options)]))[0].nonzero()[:, 0].tolist())


def test_end_tokens_are_banned_before_min_tokens():
    p = SamplingParams(min_tokens=3, temperature=2.0)
    for generated, drafts in (([], []), ([1, 2], []), ([1], [2])):
        assert support(p, generated=generated, drafts=drafts) == set(range(V)) - ENDS
    assert support(p, generated=[1, 2], drafts=[3]) == set(range(V))
    assert support(p, ends={7, V + 5}) == set(range(V)) - {7}, "ends that the model does not have"
    greedy = SamplingParams(min_tokens=1, temperature=0.0)
    best = torch.zeros(1, V).index_fill_(1, torch.tensor(sorted(ENDS)), 5.0)
    assert support(greedy, best) == {0}


@pytest.mark.parametrize("vocab", [300, 320, 31])
def test_constraints_allow_what_their_bits_say(vocab):
    allowed = {0, 5, 30, vocab - 1} | ({31, 32, 63, 64} if vocab > 64 else set())
    ours = sampler(vocab)
    rows = [row(SamplingParams(temperature=3.0)), row(SamplingParams(temperature=3.0), allowed=bits(allowed, vocab))]
    got = ours.probabilities(torch.randn(2, vocab), ours.prepare(rows))
    assert (got[0] > 0).all() and set(got[1].nonzero()[:, 0].tolist()) == allowed


def test_a_constraint_that_allows_only_the_end_beats_min_tokens():
    p = SamplingParams(min_tokens=9)
    assert support(p, allowed=bits({7, 40})) == {7, 40}
    assert support(p, allowed=bits({7, 31, 40})) == {31}


def test_nothing_is_paid_for_what_nobody_asks():
    ours, x = sampler(), torch.randn(3, V)
    step = ours.prepare([row(SamplingParams(temperature=0.0))] * 2 + [row(SamplingParams())])
    assert step.penalties is step.bias is step.banned is step.masks is step.logprobs is None
    assert ours.process(x, step) is x and ours.logprobs(x, torch.zeros(3), step) is None
    assert [g.kind for g in step.groups] == [GREEDY, PLAIN] and step.groups[0].uniform is None


def test_temperatures_near_0_are_greedy():
    x = torch.randn(2, V)
    x[:, 9] = x[:, 4] = 9.0
    ours = sampler()
    for heat in (0.0, 1e-30, 9e-6):
        step = ours.prepare([row(SamplingParams(temperature=heat, top_k=3))] * 2)
        assert ours.sample(x, step).tolist() == [4, 4] and ours.probabilities(x, step)[0, 4] == 1


def test_a_row_does_not_know_its_batch_mates():
    ours, rows = sampler(), many_rows(90)
    x = torch.randn(90, V, generator=torch.Generator().manual_seed(1)) * 4
    x[::3] = x[::3].bfloat16().float()  # as models give them: with many equals

    def all_of(order):
        step, some = ours.prepare([rows[i] for i in order]), x[order]
        tokens = ours.sample(some, step)
        kept = ours.logprobs(some, tokens, step)
        places = step.logprobs.tolist() if kept else []
        found = {order[at]: one for at, one in zip(places, kept.to_host() if kept else [])}
        return tokens, ours.probabilities(some, step), ours.process(some, step), found

    whole = all_of(list(range(90)))
    assert {len(whole[3]), 90} != {90} and len({r.params.temperature > 0 for r in rows}) == 2
    shuffled = random.Random(0).sample(range(90), 90)
    for orders in ([[i] for i in range(90)], [shuffled[:7], shuffled[7:40], shuffled[40:]]):
        for order in orders:
            part = all_of(order)
            assert all(torch.equal(a, b[order]) for a, b in zip(part[:3], whole[:3])), order
            for i, one in part[3].items():
                same, most = whole[3][i], len(one.top)
                assert (one.token_id, one.logprob, one.rank) == (same.token_id, same.logprob, same.rank)
                assert one.top == same.top[:most], "the step's largest wish decides how many there are"


def test_a_short_list_changes_nothing():
    """The op on whole rows chooses the very tokens that it chooses from their short lists."""
    op, r, ours = bound(SampleTokens()), random.Random(3), sampler(1000)
    x = (torch.randn(200, 1000) * 3).bfloat16().float()
    params = [
        SamplingParams(top_k=r.randint(1, 250), top_p=r.choice([1, 0.8]), min_p=r.choice([0, 0.05])) for _ in range(200)
    ]
    step = ours.prepare([row(p, generated=range(i)) for i, p in enumerate(params)])
    assert {g.kind for g in step.groups} == {SHORT}
    column = lambda name, dtype: torch.tensor([getattr(p, name) for p in params], dtype=dtype)  # noqa: E731
    u = rng.uniform(torch.zeros(200, dtype=torch.int64), torch.arange(200))
    f, i = torch.float32, torch.int64
    want = op(x, column("temperature", f), column("top_k", i), column("top_p", f), column("min_p", f), u)
    assert torch.equal(ours.sample(x, step), want)


def test_what_is_sampled_is_what_probabilities_say():
    """Each row's random number lies inside its token's share, shares in the order in which they are cumulated."""
    ours, rows = sampler(), many_rows(200, seed=8)
    x = torch.randn(200, V) * 2
    step = ours.prepare(rows)
    p, tokens = ours.probabilities(x, step).double(), ours.sample(x, step).tolist()
    assert ((p.sum(-1) - 1).abs() < 1e-5).all()
    processed = ours.process(x, step)
    for group in step.groups:
        for i in torch.arange(200)[group.rows].tolist():
            u = uniform_scalar(rows[i].seed, rows[i].position)
            if group.kind == GREEDY:
                assert p[i, tokens[i]] == 1
                continue
            order = torch.arange(V) if group.kind == PLAIN else processed[i].sort(descending=True, stable=True).indices
            upto = p[i, order].cumsum(0)
            place = order.tolist().index(tokens[i])
            assert upto[place] - p[i, tokens[i]] - 1e-5 <= u <= upto[place] + 1e-5 and p[i, tokens[i]] > 0


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.8},
        {"top_k": 12, "top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.02},
        {"temperature": 2.0, "top_k": 250, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    ],
)
def test_tokens_come_as_often_as_probabilities_say(asked):
    n, ours, x = 20_000, sampler(), torch.randn(1, V) * 2
    p = SamplingParams(**asked)
    kept = History([1, 2, 3], [4, 4]) if p.penalizes else None
    step = ours.prepare([BatchRow(p, i % 3, i // 3, kept) for i in range(n)])
    counts = torch.bincount(ours.sample(x.expand(n, -1), step), minlength=V).double()
    want = ours.probabilities(x, ours.prepare([BatchRow(p, 0, 0, kept)]))[0].double() * n
    assert not counts[want == 0].any()
    rare = want < 8  # counted together
    have = torch.cat((counts[~rare], counts[rare].sum()[None])) + 1e-9
    want = torch.cat((want[~rare], want[rare].sum()[None])) + 1e-9
    stat = ((have - want) ** 2 / want).sum()
    assert torch.special.gammaincc(torch.tensor((len(want) - 1) / 2.0).double(), stat / 2) > 1e-3


def test_drawing_from_a_given_distribution():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0], [0, 0, 1e-9, 0, 0, 3e-9]])
    u = (torch.arange(4000) + 0.5) / 4000
    for each, scale in ((p[0], 1.0), (p[1], 4e-9)):
        tokens = draw(each.expand(4000, -1), u)
        shares = torch.bincount(tokens, minlength=6) / 4000
        assert (shares - each / scale).abs().max() < 2e-3
    assert draw(p[:1], torch.tensor([1 - 2.0**-24])).item() == 4


def test_random_numbers_follow_the_place_in_the_text():
    """Three rows with drafts before them draw what three steps would have drawn."""
    ours, x, p = sampler(), torch.randn(3, V), SamplingParams(temperature=1.2)
    together = ours.sample(x, ours.prepare([row(p, generated=[1], drafts=[2, 3][:i], seed=77) for i in range(3)]))
    apart = [ours.sample(x[i : i + 1], ours.prepare([row(p, generated=[1, 2, 3][: i + 1], seed=77)])) for i in range(3)]
    assert together.tolist() == torch.cat(apart).tolist()
    step = ours.prepare([row(p, generated=[1], drafts=[2, 3][:i], seed=77) for i in range(3)])
    assert step.seeds.tolist() == [77] * 3 and step.positions.tolist() == [1, 2, 3]


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_that_want_the_likeliest_alone_are_prepared_once(rows, monkeypatch):
    monkeypatch.setattr("inferplane.engine.sampling.batch_rows.DEVICE_ENTRIES", 4 * V)  # four rows are drawn at once
    ours, plain = sampler(), SamplingParams(temperature=0.0)
    x = torch.randn(rows, V, generator=torch.Generator().manual_seed(rows))
    step = ours.prepare([row(plain)] * rows)
    assert step is ours.prepare([row(plain, seed=9, generated=(1, 2))] * rows)
    assert ours.sample(x, step).tolist() == x.argmax(-1).tolist()
    assert torch.equal(ours.probabilities(x, step).argmax(-1), x.argmax(-1))
    assert ours.logprobs(x, x.argmax(-1), step) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"params": SamplingParams(temperature=0.0, logprobs=2)},
        {"params": SamplingParams(temperature=0.0, min_tokens=3, max_tokens=9)},
        {"params": SamplingParams(temperature=0.0, logit_bias={5: 100.0})},
        {"params": SamplingParams(temperature=0.0, repetition_penalty=1.5), "prompt": (5,)},
        {"params": SamplingParams(temperature=0.0), "allowed": bits([5])},
        {"params": SamplingParams(temperature=0.5)},
    ],
    ids=["logprobs", "min_tokens", "bias", "penalty", "constraint", "warm"],
)
def test_rows_that_ask_for_more_are_heard(asked):
    ours, plain = sampler(), row(SamplingParams(temperature=0.0))
    more = row(**asked)
    assert plain.is_plain_greedy and not more.is_plain_greedy
    step = ours.prepare([plain, more])
    kept = (step.logprobs, step.banned, step.bias, step.penalties, step.masks)
    warm = any(group.uniform is not None for group in step.groups)
    assert step.seeds is not None and (warm or any(x is not None for x in kept))
