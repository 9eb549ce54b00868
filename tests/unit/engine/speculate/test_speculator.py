"""Drafts through the engine: the same tokens, fewer steps, rows = sum of 1 + drafts, and nobody pushed out."""

import pytest

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.speculate import AdaptiveLength, SpeculativeConfig
from inferplane.errors import UsageError
from tests.unit.engine.loop.test_steps import greedy, some
from tests.unit.support.fake_model import V, alone, engine, right

KINDS = ["right", "wrong", "alternate", "junk", "none"]


def run(script, prompts, params, **options):
    e = engine(
        options.pop("blocks", 400), script=script, **{"max_num_seqs": 16, "max_num_batched_tokens": 256, **options}
    )
    each = [e.add(p, q) for p, q in zip(prompts, params)]
    e.finish()
    return e, each


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("strategy", ["rejection", "target_match", "greedy", "topp"])
@pytest.mark.parametrize("script", KINDS)
def test_greedy_tokens_are_those_without_drafts(script, strategy):
    """Also under "topp", and also beside requests that sample."""
    params = [greedy(21)] * 4 + [SamplingParams(max_tokens=21, temperature=0.9, seed=i, top_p=0.8) for i in range(3)]
    for drafts in (1, 3, 7):
        _, each = run(script, some(7, 6), params, drafts=drafts, spec={"verify_strategy": strategy, "adaptive": False})
        assert all(map(right, each[:4]))
        assert all(len(r.generated) == 21 or r.finish_reason == "stop" for r in each)


@pytest.mark.parametrize("script", KINDS)
def test_target_match_gives_plain_samplings_tokens(script):
    params = [
        SamplingParams(max_tokens=25, temperature=1.0, seed=1),
        SamplingParams(max_tokens=25, temperature=0.5, seed=2, top_k=4, ignore_eos=True),
        SamplingParams(max_tokens=25, temperature=1.4, seed=3, top_p=0.7, min_tokens=9),
        SamplingParams(max_tokens=25, temperature=0.8, seed=4, repetition_penalty=1.4, frequency_penalty=0.3),
        SamplingParams(max_tokens=25, temperature=0.8, seed=5, min_p=0.1, logit_bias={3: 2.0}, logprobs=3),
        SamplingParams(max_tokens=25, temperature=0.0, presence_penalty=1.5, prompt_logprobs=0, logprobs=0),
    ]
    e, each = run(script, some(6, 6), params, spec={"verify_strategy": "target_match"})
    assert all(map(right, each)), [r.generated for r in each]
    assert script == "none" or e.stats()["spec_decode_num_draft_tokens_total"] > 0


@pytest.mark.parametrize("script", ["right", "alternate", "junk"])
def test_logprobs_are_those_without_drafts(script):
    params = [SamplingParams(max_tokens=15, temperature=0, ignore_eos=True, logprobs=4, prompt_logprobs=2)] * 3
    want, got = ([(r.logprobs, r.prompt_logprobs) for r in run(s, some(3, 9), params)[1]] for s in ("none", script))
    assert want == got


def test_sampling_that_ignores_drafts_is_itself():
    """reject_all: drafts cost rows and change nothing, whatever the temperature."""
    params = [SamplingParams(max_tokens=25, temperature=1.0, seed=i) for i in range(4)]
    e, each = run("junk", some(4, 6), params, spec={"accept_policy": "reject_all"})
    assert all(map(right, each)) and e.stats()["spec_decode_num_accepted_tokens_total"] == 0


def test_accept_all_takes_what_it_is_given():
    _, (r,) = run("wrong", some(1, 6), [greedy(13)], spec={"accept_policy": "accept_all", "adaptive": False}, drafts=2)
    plain = alone(tuple(r.prompt), greedy(13))[0]
    assert r.generated[0] == plain[0] and r.generated[1:3] == [(t + 1) % V for t in plain[1:3]]
    assert len(r.generated) == 13 and r.finish_reason == "length"


def test_rejection_repeats_with_a_seed_whatever_the_batch():
    params = [SamplingParams(max_tokens=20, temperature=0.8, seed=i, ignore_eos=True) for i in range(5)]
    prompts = some(5, 6)
    together = run("junk", prompts, params)[1]
    alone_ = [run("none", [p], [q], spec={"accept_policy": "reject_all"})[1][0] for p, q in zip(prompts, params)]
    assert all(map(right, alone_))
    again = run("junk", prompts, params)[1]
    assert [r.generated for r in together] == [r.generated for r in again]


# ------------------------------------------------------------------ bar i: rows and steps


@pytest.mark.parametrize(("script", "per_step"), [("right", 4), ("wrong", 1), ("none", 1)])
def test_steps_and_rows(script, per_step):
    """40 tokens after the first one, 3 drafts a step."""
    n, length = 5, 41
    e, each = run(script, some(n, 6), [greedy(length)] * n, spec={"adaptive": False})
    s = e.stats()
    assert all(map(right, each)) and s["steps_total"] == 1 + (length - 1) // per_step
    drafted, accepted = (
        s.get("spec_decode_num_draft_tokens_total", 0),
        s.get("spec_decode_num_accepted_tokens_total", 0),
    )
    assert s["forward_rows_total"] == e.runner.rows == n * 6 + n * (s["steps_total"] - 1) + drafted
    if script == "right":
        assert drafted == accepted == 3 * n * 10 and s["spec_decode_num_accepted_tokens_per_pos"] == [n * 10] * 3
    if script == "wrong":
        assert accepted == 0 and s["spec_decode_num_draft_tokens_per_pos"][0] == n * 39  # none before the last token
    assert set(e.runner.kinds[1:]) == {"decode"}, "drafts do not make a step of another kind"


def test_rows_of_a_ragged_batch():
    """One sequence with seven drafts beside fifteen with none: 23 rows, not 16 times 8."""
    e = engine(400, script="right", drafts=7, max_num_seqs=16, spec={"adaptive": False})
    each = [e.add(p, greedy(30)) for p in some(16, 4)]
    inner = e.speculator.proposer.propose
    e.speculator.proposer.propose = lambda ran, wants, hidden: [
        d if r.request is each[3] else [] for r, d in zip(ran, inner(ran, wants, hidden))
    ]
    e.step()
    before = e.runner.rows
    e.step()
    assert e.runner.rows - before == 16 + 7 == sum(1 + len(s.drafts) for s in e.now)
    e.finish()
    assert all(map(right, each))


def test_no_draft_goes_past_the_end():
    for most in range(1, 9):
        e, (r,) = run("right", some(1, 6), [greedy(most)], drafts=7, spec={"adaptive": False})
        assert right(r) and len(r.generated) == most
        assert e.runner.rows == 6 + max(0, most - 1), "every row was used"


# ------------------------------------------------------------------ room


@pytest.mark.parametrize("blocks", range(12, 30))
def test_drafts_push_nobody_out(blocks):
    """Wrong drafts: the steps and the preemptions are exactly those without drafts."""
    told = []
    for script in ("none", "wrong"):
        e, each = run(
            script, some(5, 7), [greedy(12)] * 5, blocks=blocks, block_tokens=2, drafts=5, spec={"adaptive": False}
        )
        assert all(map(right, each))
        told.append((e.stats()["num_preemptions_total"], e.stats()["steps_total"], [r.preemptions for r in each]))
    plain, drafting = told
    assert drafting[0] <= plain[0]
    if not plain[0]:
        assert drafting == plain
    assert e.metrics.finished == {"length": 5}


def test_drafts_take_no_tokens_from_others():
    """A budget of one token a sequence: everybody decodes, and drafts have to wait."""
    e, each = run("right", some(6, 1), [greedy(9)] * 6, max_num_batched_tokens=6)
    assert all(map(right, each)) and e.stats()["steps_total"] == 9
    e, each = run("right", some(6, 1), [greedy(9)] * 6, max_num_batched_tokens=8)
    assert all(map(right, each)) and e.stats()["steps_total"] < 9


def test_a_refused_draft_is_overwritten():
    """After each step every entry up to `computed` is that of the tokens that stand."""
    from tests.unit.support.fake_model import START, entry, fold

    e = engine(64, script="alternate", drafts=5, spec={"adaptive": False})
    r = e.add(some(1, 5)[0], greedy(30))
    n = e.cache.block_tokens
    while e.busy:
        e.step()
        state = START
        for i, token in enumerate(r.slice(0, r.computed) if r.blocks else ()):
            want = entry(state, token)
            assert e.runner.entries[0][r.blocks[i // n] * n + i % n] == want
            state = fold(state, want)
    assert (
        right(r)
        and 0 < e.stats()["spec_decode_num_accepted_tokens_total"] < e.stats()["spec_decode_num_draft_tokens_total"]
    )


# ------------------------------------------------------------------ the real n-gram proposer, lengths, config


def test_ngram_through_the_engine():
    prompts = [[1, 2, 3, 4, 5] * 4, [7] * 12, some(1, 12)[0]]
    config = {"num_speculative_tokens": 4, "prompt_lookup_max": 3}
    params = [greedy(60, logit_bias={t: 20.0 for t in (1, 2, 3)})] * 3  # little to choose from: it repeats itself
    e = engine(400, spec=config)
    each = [e.add(p, q) for p, q in zip(prompts, params)]
    e.finish()
    assert all(map(right, each)) and e.stats()["spec_decode_num_accepted_tokens_total"] > 10


def test_lengths_adapt():
    lengths = AdaptiveLength(5, adaptive=True)
    r = type("R", (), {"request_id": 1})
    told = []
    for drafted, accepted in ((5, 0), (4, 3), (3, 0), (2, 1), (1, 0), (0, 0), (1, 1), (3, 3), (5, 5)):
        lengths.observe(r, drafted, accepted)
        told.append(lengths.length(r))
    assert told == [4, 3, 2, 1, 1, 1, 3, 5, 5]
    lengths.forget(r)
    assert lengths.length(r) == 5
    fixed = AdaptiveLength(5, adaptive=False)
    fixed.observe(r, 5, 0)
    assert fixed.length(r) == 5


@pytest.mark.parametrize("script", KINDS)
def test_nothing_is_remembered_of_ended_requests(script):
    e, _ = run(script, some(6, 4), [SamplingParams(max_tokens=9, temperature=0)] * 6)
    assert e.speculator.lengths._length == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "magic"},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 8},
        {"prompt_lookup_max": 0},
        {"verify_strategy": "hope"},
        {"accept_policy": "some"},
        {"verify_window": -1},
        {"max_candidates": 0},
    ],
)
def test_config_says_what_it_takes(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        SpeculativeConfig(**{"method": "ngram", **wrong})


def test_a_model_without_mtp():
    with pytest.raises(UsageError, match="no multi-token-prediction"):
        engine(8, spec={"method": "mtp"})
