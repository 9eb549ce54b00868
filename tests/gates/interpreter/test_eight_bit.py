"""How far products of 8 bits lead away: random entries, outliers, and keys that share an offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferplane.kernels.triton import mla_8bit as eight_bit
from inferplane.kernels.triton.mla_8bit import mla_expanded
from inferplane.ops import MLADims
from inferplane.plugin import paged_layout
from inferplane.types.batch import Query, make_batch
from tests.gates.interpreter.benches import TILES

D = MLADims(2, 128, 64, 128, 512)
SEQUENCES = [(40, 30), (33, 0)]


class Op:
    """What the kernel sees of `mla_expanded`, with a weight of its own."""

    dims, scale, prepared = D, 192**-0.5, TILES

    def __init__(self, generator: torch.Generator) -> None:
        weight = torch.randn(D.heads * 256, 512, generator=generator) / 512**0.5
        self.kv_b: Any = type("Linear", (), {"weight": weight.bfloat16()})


def errors(change: str) -> tuple[float, float]:
    """Relative L2 error, and one minus the cosine, to attention in float64 over the same bfloat16 entries."""
    g = torch.Generator().manual_seed(5)
    op, kv = Op(g), paged_layout(64).build(D.request, 4, torch.bfloat16, torch.device("cpu"))
    queries, first, entries = [], 0, []
    for new, before in SEQUENCES:
        n = new + before
        c = torch.randn(n, 576, generator=g)
        if change == "outliers":
            c[:, ::97] *= 12
        if change == "offset":
            c[:, 512:] += 30 * torch.randn(64, generator=g)
        kv.write(torch.arange(n) + 64 * first, c.bfloat16())
        blocks = list(range(first, first - (-n // 64)))
        queries.append(Query([0] * new, before, blocks))
        entries.append(c.bfloat16().double())
        first += len(blocks)
    batch = make_batch(queries, block_tokens=64, device="cpu")
    q = torch.randn(batch.tokens, D.heads, 192, generator=g).bfloat16()
    got = mla_expanded(op, q[..., :128], q[..., 128:], batch, kv).double()
    want, at = [], 0
    for (new, before), c in zip(SEQUENCES, entries, strict=True):
        expanded = (c[:, :512] @ op.kv_b.weight.double().T).view(new + before, D.heads, 256)
        k = torch.cat((expanded[..., :128], c[:, None, 512:].expand(-1, D.heads, -1)), -1)
        s = torch.einsum("qhd,khd->hqk", q[at : at + new].double(), k) * op.scale
        late = torch.arange(new + before)[None] > torch.arange(before, before + new)[:, None]
        p = s.masked_fill(late, -torch.inf).softmax(-1)
        want.append(torch.einsum("hqk,khd->qhd", p, expanded[..., 128:]))
        at += new
    truth = torch.cat(want)
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), truth.flatten(), 0).item()
    return ((got - truth).norm() / truth.norm()).item(), 1 - cosine


@pytest.mark.parametrize("change", ["random", "outliers", "offset"])
def test_stays_near(change, record_property):
    record_property("op", "mla_expanded")
    record_property("kernel", "triton_8bit:mla_expanded")
    error, angle = errors(change)
    record_property("error", error)
    record_property("tolerance", 0.05)
    assert error <= 0.05 and angle <= 1.5e-3, (error, angle)


def test_without_its_mean_taken_away_an_offset_costs_the_keys_their_bits(monkeypatch):
    survey = eight_bit._key_means_and_value_peaks

    class Blind:
        def __getitem__(self, grid: Any) -> Any:
            def run(kv: Any, latents: Any, means: torch.Tensor, *others: Any, **named: Any) -> None:
                survey[grid](kv, latents, means, *others, **named)
                means.zero_()

            return run

    near, _ = errors("offset")
    monkeypatch.setattr(eight_bit, "_key_means_and_value_peaks", Blind())
    far, _ = errors("offset")
    assert far > 3 * near, (far, near)
