"""Sparse latent attention in Triton's interpreter: planted ties, NaN and infinite scores, chunks, parts, splits."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferplane.kernels.triton.sparse import attention, selection
from inferplane.ops import IndexDims, IndexSelect, MLADims, SparseMLAAbsorbed, choose_positions, placeholder
from inferplane.ops.draw import Draw
from inferplane.ops.op import relative_error
from inferplane.ops.sparse.attention import draw_positions
from tests.gates.interpreter.benches import LAYOUTS, TILES

NAN, INF = math.nan, math.inf
LAYOUT = {layout.name: layout for layout in LAYOUTS}


def bits(number: int) -> float:
    """The float32 number with these bits."""
    return torch.tensor([number], dtype=torch.int64).to(torch.int32).view(torch.float32).item()


SCORES = {
    "distinct": lambda g: torch.randn(400, generator=g),
    "few values": lambda g: torch.randint(-2, 2, (400,), generator=g).float() * -0.0 + torch.randint(0, 3, (400,)),
    "zeros of both signs": lambda g: torch.randn(400, generator=g).sign() * 0.0,
    "neighbours": lambda g: 1.0 + torch.randint(0, 9, (400,), generator=g) * 2.0**-23,
    "all digits": lambda g: torch.randint(-(2**31), 2**31, (400,), generator=g).int().view(torch.float32),
    "NaN": lambda g: torch.tensor([NAN, 1.0, -NAN, INF, -INF, bits(0xFFC00001)]).repeat(67)[:400],
    "-inf": lambda g: torch.full((400,), -INF),
    "mostly -inf": lambda g: torch.where(torch.rand(400, generator=g) < 0.1, 1.0, -INF),
}


@pytest.mark.parametrize("top", [5, 16, 130])
@pytest.mark.parametrize("kind", SCORES)
def test_chooses_what_the_body_chooses(kind, top, record_property):
    """Rows that see fewer, as many and more; several chunks; what a row does not see is poisoned."""
    record_property("op", "index_select")
    record_property("kernel", "triton:index_select")
    seen = sorted({1, top, top + 1, 128, 129, 256, 300, 400})
    scores = SCORES[kind](torch.Generator().manual_seed(top))
    rows = torch.stack([torch.where(torch.arange(400) < n, scores, NAN) for n in seen])
    positions = torch.tensor([0, 0, *(n - 1 for n in seen)])
    out = torch.full((len(seen) + 2, top), -7, dtype=torch.int32)
    selection.choose_largest(rows, positions, out, 2, top, 128)
    assert (out[:2] == -7).all()
    for n, got in zip(seen, out[2:]):
        hidden = torch.arange(400)[None] >= n
        want = choose_positions(scores[None].masked_fill(hidden, -INF), hidden, top)[0]
        assert torch.equal(got, want), (n, got, want)


def selecting(kind: str, rows: int, **tiles: Any) -> tuple[Any, ...]:
    d = IndexDims(3, 24, 16, 16)
    draw = Draw(4, torch.float32, build_kv=lambda r, n: LAYOUT[kind].build(r, n, torch.float32, torch.device("cpu")))
    batch, kv = draw.step(d.request, [(2, 140), (1, 15), (1, 16), (rows, 7)], written=True)
    op = SimpleNamespace(dims=d, prepared=replace(TILES, **tiles))
    q, w = draw.normal(batch.tokens, 3, 24), draw.normal(batch.tokens, 3, dtype=torch.float32)
    return d, op, q, w, batch, kv


@pytest.mark.parametrize("kind", ["paged_48", "paged_64_fp8_p2"])
def test_rows_choose_the_same_in_parts_and_however_keys_are_divided(kind, monkeypatch):
    d, op, *inputs = selecting(kind, 20)
    want = selection.index_select(op, *inputs)
    assert IndexSelect.compare(want, IndexSelect(d, d.request)(*inputs)).error == 0
    ascending = [[p for p in row if p >= 0] for row in want.tolist()]
    assert all(row == sorted(row) for row in ascending)
    monkeypatch.setattr(selection, "SCORE_BYTES", 4 * 144 * 5)
    op.prepared = replace(op.prepared, programs=1, select_tokens=128)
    assert torch.equal(selection.index_select(op, *inputs), want)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_keys_that_are_not_finite(bad):
    """What the body makes of them, which is exact here: its scores are NaN or infinite, the others are zero."""
    d, op, q, w, batch, kv = selecting("paged_64", 9)
    w = w * 0
    w[:, 0] = 1.0
    for slot in batch.slots[:2].tolist():
        kv.entries[0][slot] = bad
    got, want = selection.index_select(op, q * 0, w, batch, kv), IndexSelect(d, d.request)(q * 0, w, batch, kv)
    assert torch.equal(got, want)


def attending(top: int, sequences: list[tuple[int, int]], kind: str = "paged_48") -> tuple[Any, ...]:
    d = MLADims(5, 32, 16, 24, 48)
    draw = Draw(6, torch.float32, build_kv=lambda r, n: LAYOUT[kind].build(r, n, torch.float32, torch.device("cpu")))
    batch, kv = draw.step(d.request, sequences, written=True)
    q = draw.normal(batch.tokens, 5, 48).split((32, 16), -1)
    kv_b = draw.normal(5 * 56, 48)
    op = SparseMLAAbsorbed(placeholder(5 * 56, 48), d, 48**-0.5, d.request, top)
    view = SimpleNamespace(kv_b=kv_b, dims=d, scale=op.scale, top=top, prepared=replace(TILES, chunk_tokens=16))
    return view, kv_b, (*q, draw_positions(draw, batch, top), batch, kv)


def body(view: Any, inputs: tuple[Any, ...]) -> torch.Tensor:
    d = view.dims
    return SparseMLAAbsorbed(view.kv_b, d, view.scale, d.request, view.top)(*inputs)


@pytest.mark.parametrize("kind", ["paged_48", "paged_16_fp8"])
@pytest.mark.parametrize("programs", [1, 40])
def test_splits_are_combined(programs, kind, record_property):
    """More positions than fit a split, and rows that see nothing of the last splits."""
    record_property("op", "sparse_mla_absorbed")
    record_property("kernel", "triton:sparse_mla_absorbed")
    view, kv_b, inputs = attending(70, [(1, 200), (2, 19), (1, 0)], kind)
    view.prepared = replace(view.prepared, programs=programs)
    got, want = attention.attend_chosen(view, kv_b, *inputs), body(view, inputs)
    record_property("error", relative_error(got, want))
    assert relative_error(got, want) < 1e-5


def test_many_tokens_attend_in_parts(monkeypatch):
    view, kv_b, inputs = attending(20, [(3, 30), (9, 40), (14, 0)])
    monkeypatch.setattr(attention, "FOLDED_BYTES", 5 * 48 * 4 * 7)
    assert relative_error(attention.attend_chosen(view, kv_b, *inputs), body(view, inputs)) < 1e-5


def test_entries_that_are_not_chosen_are_not_read():
    view, kv_b, inputs = attending(8, [(1, 100), (1, 30)])
    want = attention.attend_chosen(view, kv_b, *inputs)
    *_, chosen, batch, kv = inputs
    read = {int(t[p // 48]) * 48 + p % 48 for t, row in zip(batch.block_tables, chosen.tolist()) for p in row}
    kv.entries[0][[slot for slot in range(kv.entries[0].shape[0]) if slot not in read]] = NAN
    assert torch.equal(attention.attend_chosen(view, kv_b, *inputs), want)
