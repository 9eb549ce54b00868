"""Selections: of equal scores the lower position, as transformers' indexer otherwise; what their comparison refuses."""

import math

import pytest
import torch

from inferplane.kernels.composed.sparse import take_largest
from inferplane.kvcache import paged_layout
from inferplane.ops import IndexDims, IndexSelect, RotateIndexKeys, choose_positions, mask_pairs
from inferplane.types.batch import Query, make_batch
from tests.unit.support.small import F32


def pick(scores, top):
    """Row by row, by Python's stable sort: the largest, of equal ones the first."""
    rows = []
    for row in scores.tolist():
        seen = [i for i, s in enumerate(row) if s > -math.inf]
        found = sorted(sorted(seen, key=lambda i: -row[i])[:top])
        rows.append(found + [-1] * (top - len(found)))
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("values", [3, 1, 10**6], ids=["many equal", "all equal", "few equal"])
@pytest.mark.parametrize("top", [1, 16, 63])
def test_of_equal_scores_the_lower_position_wins(values, top):
    generator = torch.Generator().manual_seed(values + top)
    scores = torch.randint(-values, values, (200, 64), generator=generator).float()
    scores[::3] *= -0.0  # zeros of both signs are equal
    hidden = mask_pairs(200, 264, None, scores.device)[:, 200:]
    scores = scores.masked_fill(hidden, -torch.inf)
    want = pick(scores, top)
    assert torch.equal(choose_positions(scores, hidden, top), want)
    assert torch.equal(take_largest(scores, hidden, top), want)


@pytest.mark.parametrize("score", [-math.inf, math.inf, math.nan, 0.0])
def test_rows_that_see_no_more_than_are_chosen_have_all(score):
    """Whatever the scores are; the last rows see more than are chosen, and never a later position."""
    hidden = mask_pairs(9, 9, None, torch.device("cpu"))
    scores = torch.full((9, 9), score).masked_fill(hidden, -torch.inf)
    for chosen in (choose_positions(scores, hidden, 5), take_largest(scores, hidden, 5)):
        for row, found in enumerate(chosen.tolist()):
            want = list(range(min(row + 1, 5)))
            assert found == want + [-1] * (5 - len(want))


def test_scores_of_all_kinds_are_taken_in_the_body_s_order():
    """NaN of both signs before infinity, and whatever is hidden behind all of them."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, -math.nan])
    scores = values[torch.randint(0, 8, (280, 40), generator=torch.Generator().manual_seed(2))]
    hidden = mask_pairs(40, 40, None, scores.device)
    for rows in scores.split(40):
        assert torch.equal(
            take_largest(rows, hidden, 9), choose_positions(rows.masked_fill(hidden, -math.inf), hidden, 9)
        )


def test_1000_rows_choose_as_transformers():
    """Of V3.2's indexer with random weights; rows whose scores of the last and the next one are equal were broken as
    stated."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Config, DeepseekV32Indexer

    config = DeepseekV32Config(
        hidden_size=48, q_lora_rank=40, qk_rope_head_dim=16, index_n_heads=4, index_head_dim=32, index_topk=32
    )
    torch.manual_seed(5)
    indexer, tokens, top = DeepseekV32Indexer(config, 0), 1000, 32
    x, c = torch.randn(1, tokens, 48), torch.randn(1, tokens, 40)
    angle = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(8) / 8)
    cos, sin = (torch.cat((t, t), -1)[None] for t in (angle.cos(), angle.sin()))
    hidden = mask_pairs(tokens, tokens, None, x.device)
    mask = torch.zeros(1, tokens, tokens).masked_fill(hidden, -torch.inf)
    with torch.no_grad():
        theirs = indexer(x, c, (cos, sin), mask, None)[0].long()
        q, k = indexer.wq_b(c)[0].view(tokens, 4, 32), indexer.k_norm(indexer.wk(x))[0]
        w = indexer.weights_proj(x)[0] * 4**-0.5 * 32**-0.5

    def rotate(t):
        a, b, rest = t.split((8, 8, 16), -1)
        cos, sin = (f.view(tokens, *(1,) * (t.dim() - 2), 8) for f in (angle.cos(), angle.sin()))
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    layout, d = paged_layout(16), IndexDims(4, 32, 16, top)
    kv = layout.build(d.request, 64, F32, torch.device("cpu"))
    batch = make_batch([Query([1] * tokens, 0, list(range(63)))], block_tokens=16, device="cpu")
    kv.write(batch.slots, rotate(k)[:, None])
    op = IndexSelect(d, d.request)
    ours = op(rotate(q), w, batch, kv)
    scores = torch.einsum("qj,qjk->qk", w, torch.einsum("qje,ke->qjk", rotate(q), rotate(k)).relu())
    scores = scores.masked_fill(hidden, -torch.inf)
    assert torch.equal(ours, pick(scores, top)), "as its own scores say"
    equal = 0
    for i in range(tokens):
        mine, other = {p for p in ours[i].tolist() if p >= 0}, {p for p in theirs[i].tolist() if p <= i}
        assert len(mine) == min(top, i + 1)
        if mine != other:  # of what only one of both has, all scores are equal, or almost
            found = scores[i, sorted(mine ^ other)]
            assert len(mine - other) == len(other - mine) and float(found.max() - found.min()) <= 1e-6
            assert float(found.max() - found.min()) > 0 or max(mine - other) < min(other - mine)
            equal += 1
    assert equal < tokens / 10


@pytest.mark.parametrize(("kv_dtype", "large"), [("fp8", 1), ("int8", 30)])
def test_spread_keys_have_the_same_scores_and_lose_less(kv_dtype, large):
    """In int8 where a few entries are larger: a scale a token loses the small ones. FP8 has exponents of its own."""
    torch.manual_seed(7)
    d, tokens = IndexDims(16, 128, 64, 64), 1024
    size = torch.ones(128)
    size[::32] = large
    k, q, w = torch.randn(tokens, 1, 128) * size, torch.randn(8, 16, 128) / size, torch.randn(8, 16)
    batch = make_batch([Query([1] * 8, tokens - 8, list(range(64)))], block_tokens=16, device="cpu")
    spread, op = RotateIndexKeys(128), IndexSelect(d, d.request)

    def select(stored, q, k):
        kv = paged_layout(16, stored).build(d.request, 64, F32, torch.device("cpu"))
        kv.write(torch.arange(tokens), k)
        return op(q, w, batch, kv).tolist()

    exact = select("auto", q, k)
    same = [len(set(a) & set(b)) for a, b in zip(exact, select("auto", spread(q), spread(k)))]
    assert min(same) >= 63
    shared = [
        sum(len(set(a) & set(b)) for a, b in zip(exact, select(kv_dtype, *pair))) / (8 * 64)
        for pair in ((q, k), (spread(q), spread(k)))
    ]
    assert shared[1] > shared[0] and shared[1] > 0.95, shared


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ([[3, 1, 2, -1]], 0),
        ([[1, 2, 4, -1]], 1 / 3),
        ([[1, 2, 2, -1]], math.inf),
        ([[1, 2, -1, -1]], math.inf),
        ([[1, 2, 3, 4]], math.inf),
        ([[1, 2, 3]], math.inf),
    ],
)
def test_comparison_is_of_sets(got, error):
    want = torch.tensor([[1, 2, 3, -1]], dtype=torch.int32)
    assert IndexSelect.compare(torch.tensor(got, dtype=torch.int32), want).error == pytest.approx(error)
