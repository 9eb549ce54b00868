"""Products of torch come in few shapes, and are what they would be in the exact ones."""

import pytest
import torch
import torch.nn.functional as F

from inferplane.kernels.composed.attention import attend
from inferplane.kernels.composed.padding import pad_rows, round_up_rows
from inferplane.ops import mask_pairs


def test_there_are_few_numbers_of_rows():
    counts = range(1, 4097)
    assert all(n <= round_up_rows(n) and (round_up_rows(n) - n < 16 or round_up_rows(n) < 1.125 * n) for n in counts)
    assert all(round_up_rows(round_up_rows(n)) == round_up_rows(n) for n in counts)
    assert len({round_up_rows(n) for n in counts}) == 48


def test_padding_is_zeros_behind():
    x = torch.randn(19, 3)
    assert pad_rows(x).shape == (32, 3)
    assert torch.equal(pad_rows(x)[:19], x) and not pad_rows(x)[19:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "window"), [(1, 7, None), (1, 40, 9), (5, 33, None), (20, 20, None), (19, 300, None), (64, 64, 16)]
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_is_the_same(dtype, m, n, window, heads):
    torch.manual_seed(m + n)
    q = torch.randn(heads[0], m, 16).to(dtype)
    k, v = torch.randn(2, heads[1], n, 16).to(dtype)
    seen = ~mask_pairs(m, n, window, q.device)
    group = heads[0] // heads[1]
    want = F.scaled_dot_product_attention(
        q.float(), k.float().repeat_interleave(group, 0), v.float().repeat_interleave(group, 0), seen, scale=0.3
    )
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    close = {"causal": False, "scale": 0.3}
    torch.testing.assert_close(attend(q, k, v, seen, **close).float(), want, **tolerance)
    if m == n and window is None:
        torch.testing.assert_close(attend(q, k, v, None, causal=True, scale=0.3).float(), want, **tolerance)
    if m == 1 and window is None:
        torch.testing.assert_close(attend(q, k, v, None, **close).float(), want, **tolerance)


def test_few_shapes_reach_torch(monkeypatch):
    met = set()
    inner = F.scaled_dot_product_attention

    def watched(q, k, v, mask, **how):
        met.add((q.shape, k.shape, None if mask is None else mask.shape))
        return inner(q, k, v, mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for m in range(1, 60):
        q, k = torch.randn(2, 2, m, 8, dtype=torch.bfloat16)
        attend(q, k, k, None, causal=True, scale=1.0)
    assert len(met) == 4
