"""Log-probabilities: of the model's own logits, with ranks and alternatives, to float32's precision."""

import pytest
import torch

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling import batch_rows as rows
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.logprobs import score
from inferplane.engine.sampling.sampler import Sampler
from inferplane.ops import SampleTokens
from inferplane.ops.sampling import stable_topk
from tests.unit.support.small import bound


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [5, 1000, 40_000])
def test_logprobs_against_float64(scale, vocab):
    x = torch.randn(7, vocab) * scale
    x[0, 1] = -torch.inf
    tokens = torch.randint(0, vocab, (7,))
    tokens[1] = x[1].argmax()
    tokens[0] = 1
    want = x.double().log_softmax(-1)
    got = score(x, tokens, 3)
    assert torch.allclose(got.logprobs.double(), want.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    top = want.topk(3, dim=-1)
    assert torch.equal(got.top_ids, top.indices) and torch.allclose(got.top.double(), top.values, rtol=1e-6, atol=1e-6)
    assert got.ranks.tolist() == [int((x[i] > x[i, t]).sum()) + 1 for i, t in enumerate(tokens)]
    assert got.ranks[1] == 1 and got.top_ids[1, 0] == tokens[1]


def test_equals_stand_in_the_order_of_their_ids():
    x = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, -1.0]])
    got = score(x, torch.tensor([5]), 6)
    assert got.top_ids.tolist() == [[1, 2, 5, 0, 3, 4]] and got.ranks.tolist() == [1]
    for count in range(1, 8):
        values, ids = stable_topk(x, count)
        assert ids.tolist() == [[1, 2, 5, 0, 3, 4, 6][:count]] and torch.equal(values, x.gather(1, ids))


def test_order_is_that_of_a_stable_sort():
    x = torch.randn(20, 700).bfloat16().float()
    x[:, ::50] = -torch.inf
    x[3, 5] = torch.inf
    want = x.sort(stable=True, descending=True, dim=-1)
    for count in (0, 1, 9, 128, 700):
        values, ids = stable_topk(x, count)
        assert torch.equal(ids, want.indices[:, :count]) and torch.equal(values, want.values[:, :count])


def test_prompts_in_pieces(monkeypatch):
    x, tokens = torch.randn(53, 200), torch.randint(0, 200, (53,))
    whole = score(x, tokens, 2)
    monkeypatch.setattr(rows, "HOST_ENTRIES", 1000)
    assert rows.max_rows_at_once(200, x.device) == 5
    assert score(x, tokens, 2).to_host() == whole.to_host()
    assert len(score(x[:0], tokens[:0]).to_host()) == 0


def test_they_are_the_models_own():
    """Neither temperature nor penalties nor cuts change them, and only rows that want them have them."""
    sampler, x = Sampler(bound(SampleTokens()), 100, "cpu"), torch.randn(4, 100)
    p = SamplingParams(temperature=0.3, top_k=2, logit_bias={3: 50.0}, logprobs=2)
    step = sampler.prepare(
        [
            BatchRow(SamplingParams(), 0, 0),
            BatchRow(p, 0, 0),
            BatchRow(SamplingParams(), 0, 0),
            BatchRow(SamplingParams(logprobs=0), 0, 0),
        ]
    )
    tokens = sampler.sample(x, step)
    assert tokens[1] == 3
    got = sampler.logprobs(x, tokens, step)
    assert step.logprobs.tolist() == [1, 3] and got.tokens.tolist() == tokens[[1, 3]].tolist()
    first, second = got.to_host()
    want = x.log_softmax(-1)
    assert first.token_id == 3 and abs(first.logprob - want[1, 3].item()) < 1e-6
    assert [i for i, _ in first.top] == want[1].topk(2).indices.tolist()
    assert second.token_id == tokens[3] and second.rank >= 1 and len(second.top) == 2
    assert [len(t.top) for t in got.to_host(step.alternatives)] == [2, 0]
