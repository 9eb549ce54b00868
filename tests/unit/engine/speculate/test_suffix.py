"""Suffix decoding: what is found, what is counted, what is dropped, and who sees whose answers."""

import random

import pytest

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.speculate import ProposerContext, SpeculativeConfig, SuffixIndex, SuffixProposer, VerifiedChunk
from inferplane.engine.speculate.text import EarlierAnswers
from inferplane.engine.speculate.text import suffix as suffix_module
from inferplane.engine.speculate.text.suffix_index import BETWEEN, KEYS, MAX_OCCURRENCES, Occurrence
from inferplane.errors import UsageError
from tests.unit.engine.loop.test_steps import greedy, some
from tests.unit.support.fake_model import V, engine, right

ANY = {"per_match": 64.0, "min_probability": 0.0}


def index_of(*texts, depth=24):
    index = SuffixIndex(depth)
    for text in texts:
        index.extend(text)
        index.end_text()
    return index


def proposer(**options):
    return SuffixProposer(ProposerContext(SpeculativeConfig("suffix", num_speculative_tokens=7, **options), V))


def request(number, prompt, generated, tenant=""):
    made = Request(number, list(prompt), SamplingParams(max_tokens=100), tenant=tenant)
    made.generated += generated
    return made


def drafts(of, made, most=7):
    chunk = VerifiedChunk(made, 0, 0, made.tokens - 1, 0, 0, [])
    return of.propose([chunk], [most], None)[0]


# ------------------------------------------------------------------ the index


def slow_find(texts, suffix, depth):
    """Every earlier occurrence by comparing all places: (matched, place)."""
    tokens = [token for text in texts for token in (*text, BETWEEN)]
    for key in KEYS:
        found = []
        for place in range(1, len(tokens)):
            matched = 0
            while (
                matched < min(depth, len(suffix), place)
                and tokens[place - 1 - matched] == suffix[len(suffix) - 1 - matched]
            ):
                matched += 1
            if matched >= key:
                found.append((matched, place))
        if found:
            return sorted(sorted(found, key=lambda f: -f[1])[:MAX_OCCURRENCES], reverse=True)
    return []


@pytest.mark.parametrize("seed", range(6))
def test_occurrences_are_those_of_a_search_of_all_places(seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 30))] for _ in range(12)]
    for depth in (1, 2, 3, 7):
        for dropped in (0, 3, 11):
            index = index_of(*texts, depth=depth)
            for text in texts[:dropped]:
                index.drop_first_text(len(text) + 1)
            shift = sum(len(text) + 1 for text in texts[:dropped])
            for _ in range(20):
                suffix = [rng.randrange(4) for _ in range(rng.randrange(1, depth + 1))]
                keys = [key for key in KEYS if key <= depth]
                want = slow_find(texts[dropped:], suffix, depth)
                assert keys and index.find(suffix) == [Occurrence(m, p + shift) for m, p in want]


def test_a_sequence_does_not_find_its_own_end():
    index = SuffixIndex(8)
    index.extend([5, 6, 7])
    assert index.find([5, 6, 7]) == []
    index.extend([5, 6, 7])
    assert index.find([5, 6, 7, 5, 6, 7]) == [Occurrence(3, 3)]


def test_the_most_frequent_token_is_drafted_with_its_probability():
    index = index_of([1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 2, 3, 5, 7], [1, 2, 3, 4, 8])
    found = index.draft([1, 2, 3], 7, **ANY)
    assert found.tokens == [4, 8] and found.score == pytest.approx(3 / 4 + 1 / 2)
    assert index.draft([1, 2, 3], 7, 64.0, 0.6).tokens == [4]
    assert index.draft([1, 2, 3], 7, 64.0, 0.8).tokens == []


def test_equally_frequent_tokens_the_newest_first():
    assert index_of([1, 2, 3, 4], [1, 2, 3, 5]).draft([1, 2, 3], 1, **ANY).tokens == [5]


def test_drafts_are_as_long_as_what_matched():
    index = index_of([*range(1, 40)])
    for matched in (1, 3, 5):
        suffix = [99, *range(10 - matched + 1, 11)]
        for factor in (0.0, 0.5, 1.0, 2.0):
            want = list(range(11, 11 + min(7, int(factor * matched))))
            assert index.draft(suffix, 7, factor, 0.1).tokens == want
    assert index.draft([*range(5, 11)], 2, 1.0, 0.1).tokens == [11, 12]


def test_a_longer_match_counts_more_than_a_frequent_short_one():
    index = index_of([1, 2, 3, 4, 50, 51], *([9, 3, 4, 60, 61],) * 3)
    assert index.draft([1, 2, 3, 4], 2, **ANY).tokens == [50, 51]
    assert index.draft([8, 3, 4], 2, **ANY).tokens == [60, 61]


def test_a_draft_ends_where_its_text_does():
    assert index_of([1, 2, 3, 4], [5, 6]).draft([1, 2, 3], 7, **ANY).tokens == [4]


def test_what_is_dropped_leaves_nothing():
    rng = random.Random(1)
    texts = [[rng.randrange(9) for _ in range(20)] for _ in range(50)]
    index = SuffixIndex(24)
    for number, text in enumerate(texts):
        index.extend(text)
        index.end_text()
        if number >= 5:
            index.drop_first_text(21)
    for _ in texts[-5:]:
        index.drop_first_text(21)
    assert len(index) == 0 and index.tokens == [] and not any(index._links)
    assert all(set(newest) <= {()} for newest in index._newest)


# ------------------------------------------------------------------ earlier answers


def test_the_oldest_answers_are_dropped_beyond_each_limit():
    answers = EarlierAnswers(24, 3, 1000)
    for number in range(10):
        answers.add(f"tenant {number % 4}", [number] * 10)
    assert len(answers) == 3 and answers.tokens == 33
    assert answers.of("tenant 2") is None and len(answers.of("tenant 1")) == 11
    answers = EarlierAnswers(24, 100, 50)
    for number in range(10):
        answers.add("", [number] * 11)
    assert len(answers) == 4 and answers.tokens == 48 == len(answers.of(""))
    answers.add("", [1] * 51)  # more than all may have: nothing else is dropped for it
    assert len(answers) == 4
    answers.add("", [1] * 49)
    assert len(answers) == 1 and answers.tokens == 50


def test_answers_of_another_tenant_are_not_seen():
    """Their drafts would be accepted, which a client could tell by time."""
    of, text = proposer(), [*range(20, 40)]
    of.forget(request(1, [1, 2], text, tenant="a"))
    for tenant, want in (("b", []), ("", []), ("a", text[4:8])):
        asks = request(2, [7, 8], text[:4], tenant=tenant)
        assert drafts(of, asks) == want
        of.own.clear()


def test_the_request_alone():
    of, text = proposer(suffix_decoding_max_cached_requests=0), [*range(20, 40)]
    of.forget(request(1, [1, 2], text))
    assert drafts(of, request(2, [7, 8], text[:4])) == [] and len(of.answers) == 0
    assert drafts(of, request(3, text, text[:4])) == text[4:8]


def test_what_promises_more_is_taken():
    """The request's own text against earlier answers."""
    of = proposer(suffix_decoding_max_spec_factor=8.0)
    of.forget(request(1, [], [1, 2, 3, 4, 5, 30, 31, 32]))
    assert drafts(of, request(2, [9, 5, 70, 71, 9, 8, 5, 90, 91], [1, 2, 3, 4, 5]), 3) == [30, 31, 32]
    of = proposer(suffix_decoding_max_spec_factor=8.0)
    of.forget(request(1, [], [9, 5, 70, 71, 9, 8, 5, 90, 91]))
    assert drafts(of, request(2, [1, 2, 3, 4, 5, 30, 31, 32], [1, 2, 3, 4, 5]), 3) == [30, 31, 32]


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch):
    monkeypatch.setattr(suffix_module, "MAX_NEW_TOKENS", 8)
    of, prompt = proposer(), [*range(30)]
    asks = request(1, prompt, [3, 4, 5])
    assert [bool(drafts(of, asks)) for _ in range(6)] == [False] * 4 + [True] * 2
    assert drafts(of, asks) == [6, 7, 8]


def test_nothing_is_indexed_while_drafting_is_paused():
    of, asks = proposer(), request(1, [1, 2, 3, 1, 2, 3], [1, 2])
    of.is_paused = True
    assert drafts(of, asks, 0) == [] and of.own == {}
    assert drafts(of, asks, 1) == [3], "for a trial"


def test_an_ended_request_frees_its_index():
    of = proposer()
    asks = request(1, [1, 2, 3], [1, 2])
    drafts(of, asks)
    of.forget(asks)
    assert of.own == {} and len(of.answers) == 1
    of.forget(request(2, [1], []))
    assert len(of.answers) == 1, "a request without an answer leaves none"


# ------------------------------------------------------------------ through the engine


def test_suffixes_through_the_engine():
    prompts = [[1, 2, 3, 4, 5] * 4, [7] * 12, some(1, 12)[0]]
    params = [greedy(60, logit_bias={t: 20.0 for t in (1, 2, 3)})] * 3  # little to choose from: it repeats itself
    for config, kept in (({}, 6), ({"only_if_faster": False}, 6), ({"suffix_decoding_max_cached_requests": 0}, 0)):
        e = engine(400, spec={"method": "suffix", "num_speculative_tokens": 4, **config})
        each = [e.add(p, q) for _ in range(2) for p, q in zip(prompts, params)]
        e.finish()
        assert all(map(right, each))
        assert "only_if_faster" not in config or e.stats()["spec_decode_num_accepted_tokens_total"] > 10
        assert e.speculator.proposer.own == {} and len(e.speculator.proposer.answers) == kept


def test_a_second_request_copies_the_first_ones_answer():
    e = engine(400, spec={"method": "suffix", "num_speculative_tokens": 7, "adaptive": False})
    steps = []
    for tenant in ("a", "b", "a"):
        before = e.stats().get("steps_total", 0)
        asked = e.add(some(1, 12)[0], greedy(40), tenant=tenant)
        e.finish()
        assert right(asked)
        steps.append(e.stats()["steps_total"] - before)
    assert steps[0] == steps[1] > 1.5 * steps[2]


def test_sampled_tokens_are_those_of_plain_sampling():
    params = [SamplingParams(max_tokens=40, temperature=0.7, seed=i, ignore_eos=True) for i in range(4)]
    e = engine(400, spec={"method": "suffix", "num_speculative_tokens": 5, "verify_strategy": "target_match"})
    each = [e.add(p, q) for p, q in zip([[1, 2, 3] * 5] * 4, params)]
    e.finish()
    assert all(map(right, each))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", 257),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_cached_tokens", -1),
        ("suffix_decoding_max_spec_factor", -0.1),
        ("suffix_decoding_max_spec_factor", float("nan")),
        ("suffix_decoding_min_token_prob", 1.1),
        ("suffix_decoding_min_token_prob", "0.1"),
        ("suffix_decoding_max_tree_depth", 2.0),
    ],
)
def test_options_out_of_range(name, value):
    with pytest.raises(UsageError, match=name):
        SpeculativeConfig.of({"method": "suffix", name: value})


def test_a_suffix_has_no_model_and_no_weights():
    with pytest.raises(UsageError, match="'suffix' with model"):
        SpeculativeConfig("suffix", model="demo-draft")
    with pytest.raises(UsageError, match="'suffix', which has no weights"):
        SpeculativeConfig("suffix", draft_quantization="a8w8")


def test_it_drafts_while_a_step_is_in_flight():
    """Whose token `tokens` counts, though it is not known."""
    made = request(1, some(1, 9)[0] * 4, some(1, 9)[0][:4])
    want = drafts(proposer(), made)
    made.pending = 1
    assert drafts(proposer(), made) == want != []


def test_where_drafts_decide_what_a_seed_draws_they_depend_on_the_request_alone():
    text, seeded = list(range(14)), SamplingParams(max_tokens=100, seed=3, temperature=0.8)
    for strategy, has_drafts in (("rejection", False), ("target_match", True)):
        of = proposer(verify_strategy=strategy)
        of.answers.add("", text)
        made = Request(1, text[:9], seeded)
        assert bool(drafts(of, made)) == has_drafts
        made = Request(2, text[:9], SamplingParams(max_tokens=100, temperature=0.8))
        assert drafts(of, made), "without a seed nothing is promised"
