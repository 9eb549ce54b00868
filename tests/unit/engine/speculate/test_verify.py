"""Verification: which drafts stand, and that what comes out is distributed as if there had been none."""

import math
from functools import lru_cache

import pytest
import torch

from inferplane.engine.request import seeds as seed_math
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.speculate import SpeculativeConfig, ngram_drafts, verify
from tests.unit.support.chi_square import chi_square_p
from tests.unit.support.fake_model import TABLE, V, sampler

DRAWS = 20_000
LOGITS = TABLE[[5, 6, 7]] / 2


def config(strategy="rejection", **more):
    return SpeculativeConfig("ngram", verify_strategy=strategy, num_speculative_tokens=3, **more)


@lru_cache(maxsize=8)
def rows_of(params, drafts, first_seed):
    """Drawn tokens, distributions and random numbers of DRAWS sequences with these two drafts, each with its seed."""
    logits = LOGITS.repeat(DRAWS, 1)
    seeds = range(first_seed, first_seed + DRAWS)
    rows = [BatchRow(params, seed_math.child_seed(77, s), i, None, drafts[:i]) for s in seeds for i in range(3)]
    step = sampler().prepare(rows)
    uniforms = torch.stack([rng.uniform(step.seeds, step.positions, stream) for stream in (1, 2)], 1)
    return sampler().sample(logits, step), sampler().probabilities(logits, step), uniforms


def outcomes(strategy, params, drafts, first_seed=0):
    """What the engine makes of them."""
    drawn, p, uniforms = rows_of(params, tuple(drafts), first_seed)
    return verify(drawn, [drafts] * DRAWS, config(strategy), p, uniforms), p[:3], drawn.view(-1, 3)


def p_values(got, p, drafts):
    """First token; second where the first draft stood; the bonus token where both stood."""
    out = []
    for i in range(3):
        reached = got.counts > i
        assert reached.sum() > 300, "too few draws to judge"
        out.append(chi_square_p(torch.bincount(got.tokens[reached, i], minlength=V), p[i]))
    return out


PARAMS = {
    "0.5": {"temperature": 0.5},
    "1.0": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 5},
}


def likely(rank):
    """Drafts of this rank in each row."""
    return [int(LOGITS[i].argsort(descending=True)[rank]) for i in range(2)]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
def test_lossless_strategies_keep_the_distribution(strategy, params):
    """Bar g. A position's token, given that the drafts before it stood, has the model's own distribution there."""
    drafts = likely(1 if params != "0.5" else 0)
    got, p, _ = outcomes(strategy, SamplingParams(**PARAMS[params]), drafts)
    if min(p[0, drafts[0]], p[1, drafts[1]]) * DRAWS < 400:
        pytest.fail("the drafts are too unlikely to test anything")
    values = p_values(got, p, drafts)
    assert min(values) > 1e-3, values
    # both accept with the draft's own probability
    rate = float((got.counts > 1).float().mean())
    assert abs(rate - p[0, drafts[0]]) < 4 * math.sqrt(0.25 / DRAWS)


@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
def test_joint_distribution_of_two_tokens(strategy):
    """The first two tokens together, with the second draw where a first draft was refused left to the next step."""
    drafts = likely(0)
    got, p, _ = outcomes(strategy, SamplingParams(temperature=1.0), drafts, first_seed=50_000)
    stood = got.counts > 1
    assert (got.tokens[stood, 0] == drafts[0]).all() and (got.tokens[~stood, 0] != drafts[0]).all()
    assert chi_square_p(torch.bincount(got.tokens[:, 0], minlength=V), p[0]) > 1e-3
    assert chi_square_p(torch.bincount(got.tokens[stood, 1], minlength=V), p[1]) > 1e-3


@pytest.mark.parametrize("strategy", ["topp", "greedy"])
def test_lossy_strategies_do_not(strategy):
    """They are documented as lossy: a draft inside the nucleus stands always; the likeliest one stands always."""
    drafts = likely(1 if strategy == "topp" else 0)
    got, p, _ = outcomes(strategy, SamplingParams(temperature=1.0), drafts)
    counts = torch.bincount(got.tokens[:, 0], minlength=V)
    assert p[0, drafts[0]] < 0.9 and counts[drafts[0]] == DRAWS
    assert chi_square_p(counts, p[0]) < 1e-9


def test_the_test_notices_a_small_bias():
    """Accepting a tenth more often than right is found with this many draws."""
    p = LOGITS[0].softmax(-1)
    off = p.clone()
    off[int(p.argmax())] *= 1.1
    counts = torch.bincount(
        torch.multinomial(off, DRAWS, True, generator=torch.Generator().manual_seed(0)), minlength=V
    )
    assert chi_square_p(counts, p) < 1e-3


def test_target_match_is_what_plain_sampling_draws():
    drafts = likely(0)
    got, _, drawn = outcomes("target_match", SamplingParams(temperature=1.0), drafts)
    for i in range(3):
        reached = got.counts > i
        assert torch.equal(got.tokens[reached, i], drawn[reached, i])


# ------------------------------------------------------------------ by hand


def one(strategy, drafts, p, uniforms, drawn, **more):
    got = verify(torch.tensor(drawn), drafts, config(strategy, **more), torch.tensor(p), torch.tensor(uniforms))
    return [t[:n] for t, n in zip(got.tokens.tolist(), got.counts.tolist())]


def test_ragged_rows():
    """Three, none and one draft in five plus one plus two rows; each sequence looks at its own rows only."""
    drawn = torch.tensor([4, 5, 9, 7, 3, 8, 6])
    got = verify(drawn, [[4, 5, 6], [], [8]], config("target_match"))
    assert [t[:n] for t, n in zip(got.tokens.tolist(), got.counts.tolist())] == [[4, 5, 9], [3], [8, 6]]
    assert verify(drawn[:2], [[], []], config("target_match")).counts.tolist() == [1, 1]


def test_rejection_by_hand():
    p = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 1.0, 0.0]]
    drawn = [0, 2, 1]
    take, draw = 0.0, 0.0
    # accepted while the number is below the draft's probability
    assert one("rejection", [[1, 2]], p, [[0.29, draw], [0.69, draw], [take, draw]], drawn) == [[1, 2, 1]]
    # refused: drawn again from the rest, here {0: .5, 2: .2}
    assert one("rejection", [[1, 2]], p, [[0.31, 0.70], [0.0, 0.0], [0.0, 0.0]], drawn) == [[0]]
    assert one("rejection", [[1, 2]], p, [[0.31, 0.72], [0.0, 0.0], [0.0, 0.0]], drawn) == [[2]]
    # the first stands, the second does not: {0: .1, 1: .2}
    assert one("rejection", [[1, 2]], p, [[0.0, 0.9], [0.71, 0.34], [0.0, 0.9]], drawn) == [[1, 1]]
    # a draft without probability never stands, one with all of it always
    never, certain = [[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]
    assert one("rejection", [[0]], never, [[0.0, 0.5], [0.0, 0.0]], [1, 0]) == [[1]]
    assert one("rejection", [[0]], certain, [[1 - 2**-24, 0.5], [0.0, 0.0]], [0, 1]) == [[0, 1]]


@pytest.mark.parametrize(("policy", "want"), [("accept_all", [[1, 2, 1], [0]]), ("reject_all", [[0], [0]])])
def test_policies(policy, want):
    drawn = torch.tensor([0, 2, 1, 0])
    got = verify(drawn, [[1, 2], []], config("rejection", accept_policy=policy))
    assert [t[:n] for t, n in zip(got.tokens.tolist(), got.counts.tolist())] == want


def test_topp_by_hand():
    p = [[0.4, 0.3, 0.2, 0.1, 0.0]] * 4
    u, drawn = [[0.5, 0.5]] * 4, [0, 1, 2, 3]

    def accepted(drafts, **more):
        return (
            len(one("topp", [drafts], p[: len(drafts) + 1], u[: len(drafts) + 1], drawn[: len(drafts) + 1], **more)[0])
            - 1
        )

    assert accepted([3, 2, 1]) == 3 and accepted([3, 4, 1]) == 1, "any that kept a probability"
    assert accepted([2, 0, 0], max_candidates=2) == 0, "among the first candidates"
    # outside them the second-best one stands when the next ones are the likeliest
    assert accepted([1, 0, 0], max_candidates=1) == 3
    assert accepted([1, 0], max_candidates=1) == 0 and accepted([1, 0, 1], max_candidates=1) == 0
    assert accepted([2, 0, 0], max_candidates=1) == 0


def test_topp_looks_at_a_sequence_s_own_drafts():
    """Behind its last draft nothing follows, whoever stands in the next rows: here one whose likeliest token is 0."""
    p, drawn = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]] * 8), torch.tensor([0, 1, 2, 3] * 2)
    lossy = config("topp", max_candidates=1)
    uniforms = torch.full((8, 2), 0.5)
    alone = verify(drawn[:3], [[1, 0]], lossy, p[:3], uniforms[:3])
    beside = verify(drawn[:7], [[1, 0], [0, 0, 0]], lossy, p[:7], uniforms[:7])
    assert int(alone.counts[0]) == int(beside.counts[0]) == 1


def test_topp_leaves_greedy_rows_alone():
    """A distribution of one token has no second-best one, wherever its zeros are sorted."""
    certain = torch.eye(V)[[3, 4, 5, 6]]
    for draft in range(V):
        got = verify(torch.tensor([3, 4, 5, 6]), [[draft, 4, 5]], config("topp"), certain, torch.zeros(4, 2))
        assert got.counts.tolist() == ([4] if draft == 3 else [1])


# ------------------------------------------------------------------ n-grams


@pytest.mark.parametrize(
    ("prompt", "generated", "most", "longest", "want"),
    [
        ([1, 2, 3, 4, 5], [2, 3], 2, 3, [4, 5]),  # what followed it in the prompt
        ([1, 2, 3, 4, 5], [2, 3], 9, 3, [4, 5]),  # clipped at the prompt's end
        ([9, 3, 7, 1, 2, 3, 8], [2, 3], 1, 3, [8]),  # the longer key wins, though the shorter stands earlier
        ([9, 3, 7, 1, 2, 3, 8], [2, 3], 1, 1, [7]),  # unless keys are short
        ([5, 1, 5, 2], [5], 1, 3, [1]),  # the earliest place
        ([5, 1], [5, 2, 5], 1, 3, [1]),  # the prompt before the generated text
        ([0], [5, 2, 5], 3, 3, [2, 5]),  # then the text itself
        ([0], [4, 4], 5, 3, [4]),  # it may overlap the key
        ([1, 2, 5], [5], 3, 3, []),  # nothing follows in the prompt, and the text has it once
        ([5, 1, 5], [7, 5], 3, 3, [1, 5]),
        ([1, 2, 3], [9], 3, 3, []),
        ([1, 2, 3], [], 3, 3, []),
        ([], [1], 3, 3, []),
        ([1, 1, 1, 2], [1, 1], 2, 2, [1, 2]),  # the first of overlapping places
    ],
)
def test_ngram_drafts(prompt, generated, most, longest, want):
    assert ngram_drafts(prompt, generated, most, longest) == want
    assert ngram_drafts(tuple(prompt), tuple(generated), most, longest) == want
