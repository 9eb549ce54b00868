"""Sinks and the soft cap of scores against dense attention in float64, and what they are at their limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.composed import attention as composed
from inferplane.ops import Attention
from inferplane.types import KVRequest
from tests.unit.ops.test_attention import world

SEQUENCES = [(1, 0), (9, 30), (40, 3)]


def dense(q, k, v, scale, window, sinks, softcap):
    """One sequence, `[m, H, Dv]` in float64; the sink is a key whose value is 0."""
    m, n, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.zeros(m, q.shape[1], v.shape[-1], dtype=torch.float64)
    for i in range(m):
        last = n - m + i
        seen = [t for t in range(n) if t <= last and (window is None or last - t < window)]
        for h in range(q.shape[1]):
            s = (k[seen, h // group].double() @ q[i, h].double()) * scale
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            weights = s.exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[i, h] = weights / total @ v[seen, h // group].double()
    return out


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(("with_sinks", "softcap"), [(True, None), (False, 0.4), (True, 1.5)])
@pytest.mark.parametrize("max_scores", [composed.MAX_SCORES, 600])
def test_sinks_and_soft_caps(with_sinks, softcap, window, max_scores, monkeypatch):
    """The body and the composed kernel, which computes few rows at a time where it holds few scores."""
    monkeypatch.setattr(composed, "MAX_SCORES", max_scores)
    request = KVRequest("gqa", 2, 16, 24, window)
    batch, kv, ks, vs = world(request, SEQUENCES)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(batch.tokens, 6, 16, generator=g)
    sinks = torch.randn(6, generator=g) if with_sinks else None
    op = Attention(6, 0.3, request, "many", sinks, softcap)
    view = SimpleNamespace(heads=6, scale=0.3, kv=request, sinks=sinks, softcap=softcap)
    for got in (op(q, batch, kv), composed.attention_forms(view, q, batch, kv)):
        for (a, b, _n, _table), k, v in zip(batch.rows(), ks, vs):
            want = dense(q[a:b], k, v, 0.3, window, sinks, softcap)
            assert (got[a:b] - want).abs().max() <= 2e-6 * want.abs().max()


def test_limits():
    """A sink of minus infinity and a large cap change nothing; a large sink takes all the weight."""
    request = KVRequest("gqa", 2, 16, 16)
    batch, kv, *_ = world(request, SEQUENCES)
    q = torch.randn(batch.tokens, 4, 16, generator=torch.Generator().manual_seed(2))
    plain = Attention(4, 0.25, request)(q, batch, kv)

    def with_sinks(value):
        return Attention(4, 0.25, request, "many", torch.full((4,), value))(q, batch, kv)

    assert torch.equal(with_sinks(-torch.inf), plain)
    assert with_sinks(60.0).abs().max() < 1e-12 < plain.abs().max()
    capped = Attention(4, 0.25, request, "many", None, 1e4)(q, batch, kv)
    assert (capped - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert Attention(4, 0.25, request).extensions() == frozenset()
    assert Attention(4, 0.25, request, softcap=30.0).extensions() == {"attention.softcap"}
