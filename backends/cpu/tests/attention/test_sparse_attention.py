"""Selections and attention over chosen latents: against their bodies in odd sizes, with equal scores, row by row."""

from types import SimpleNamespace

import pytest
import torch

from inferplane.binding import View
from inferplane.ops import Draw, IndexDims, IndexSelect, MLADims, SparseMLAAbsorbed, hide_others
from inferplane.ops.sparse.attention import draw_positions
from inferplane.types import HOST
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.kernels.attention import LAYOUTS, mla_absorbed
from inferplane_cpu.kernels.sparse_attention import (
    _expands_sooner,
    index_select,
    sparse_mla_absorbed,
    sparse_mla_expanded,
)
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
INDEXES = {
    "V3.2": IndexDims(64, 128, 64, 96),
    "one head": IndexDims(1, 2, 2, 5),
    "odd heads": IndexDims(19, 24, 16, 33),
    "more heads": IndexDims(130, 40, 16, 1),
}
LATENTS = {"V3.2": MLADims(16, 128, 64, 128, 512), "odd": MLADims(3, 7, 16, 5, 48)}
SEQUENCES = [(1, 0), (1, 700), (3, 94), (8, 31), (40, 300)]


def build(layout, request, blocks):
    return next(x for x in layouts(request) if x.name == layout).build(request, blocks, torch.bfloat16, HOST)


def draw_of(seed, layout):
    return Draw(seed, torch.bfloat16, build_kv=lambda request, blocks: build(layout, request, blocks))


def integers(draw, *shape, most):
    """Numbers whose products and sums are exact, so that many scores are equal."""
    return (draw.ints(*shape, below=2 * most + 1) - most).to(torch.bfloat16)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("most", [1, 7], ids=["many equal", "few equal"])
@pytest.mark.parametrize("dims", INDEXES.values(), ids=INDEXES)
def test_selections_are_the_body_s(dims, most, name):
    draw = draw_of(3, LAYOUTS[0])
    batch, kv = draw.step(dims.request, SEQUENCES, written=True)
    slots = torch.arange(len(kv.entries[0]) - 1)
    kv.write(slots, integers(draw, len(slots), 1, dims.dim, most=most))
    q = integers(draw, batch.tokens, dims.heads, dims.dim, most=most)
    w = integers(draw, batch.tokens, dims.heads, most=2).float()
    op = IndexSelect(dims, dims.request)
    with use_instruction_set(name):
        got = index_select(op, q, w, batch, kv)
    assert torch.equal(got, op(q, w, batch, kv))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_selection_is_the_same_whoever_is_beside_it(layout, name):
    dims, draw = INDEXES["V3.2"], draw_of(5, layout)
    batch, kv = draw.step(dims.request, SEQUENCES, written=True)
    q, w = draw.normal(batch.tokens, dims.heads, dims.dim), draw.normal(batch.tokens, dims.heads).float()
    op = IndexSelect(dims, dims.request)
    with use_instruction_set(name):
        whole = index_select(op, q, w, batch, kv)
        for i, (first, last, _, table) in enumerate(batch.rows()):
            alone = SimpleNamespace(
                query_start=torch.tensor([0, last - first], dtype=torch.int32),
                seq_lens=batch.seq_lens[i : i + 1].clone(),
                block_tables=table[None],
            )
            assert torch.equal(index_select(op, q[first:last], w[first:last], alone, kv), whole[first:last])
    assert IndexSelect.compare(whole, op(q, w, batch, kv)).error <= 0.02


@pytest.mark.parametrize("name", SETS)
def test_a_long_context(name):
    """More scores than are in memory at a time, and 2048 of 9000."""
    dims, draw, tokens = IndexDims(16, 32, 16, 2048), draw_of(6, LAYOUTS[0]), 9000
    new = 600
    batch, kv = draw.step(dims.request, [(new, tokens - new)], written=True)
    q, w = integers(draw, new, 16, 32, most=4), integers(draw, new, 16, most=3).float()
    kv.write(torch.arange(len(kv.entries[0]) - 1), integers(draw, len(kv.entries[0]) - 1, 1, 32, most=4))
    op = IndexSelect(dims, dims.request)
    with use_instruction_set(name):
        got = index_select(op, q, w, batch, kv)
    rows = torch.tensor([0, 7, 255, 256, 599])
    k = kv.read(batch.block_tables[0], tokens)[0][:, 0].float()
    for row in rows.tolist():
        seen = tokens - new + row + 1
        scores = (w[row, :, None] * (q[row].float() @ k[:seen].T).relu()).sum(0)
        want = scores.sort(descending=True, stable=True).indices[:2048].sort().values
        assert torch.equal(got[row].long(), want)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", LATENTS.values(), ids=LATENTS)
def test_attention_over_chosen_latents(dims, layout, name):
    draw = draw_of(7, layout)
    batch, kv = draw.step(dims.request, SEQUENCES, written=True)
    kv_b = draw.normal(dims.heads * (dims.nope + dims.value), dims.latent) / 20
    chosen = draw_positions(draw, batch, 70)
    q_nope, q_rope = draw.normal(batch.tokens, dims.heads, dims.nope), draw.normal(batch.tokens, dims.heads, dims.rope)
    scale = (dims.nope + dims.rope) ** -0.5
    op = SparseMLAAbsorbed(kv_b, dims, scale, dims.request, 70)
    want = op(q_nope.float(), q_rope.float(), chosen, batch, kv)
    site = View(kv_b=kv_b, dims=dims, scale=scale, kv=dims.request, top=70)
    with use_instruction_set(name):
        got = sparse_mla_absorbed(site, q_nope, q_rope, chosen, batch, kv)
        rows = slice(2, 5)  # of the third sequence
        alone = SimpleNamespace(
            query_start=torch.tensor([0, 3], dtype=torch.int32),
            seq_lens=batch.seq_lens[2:3].clone(),
            block_tables=batch.block_tables[2:3],
        )
        assert torch.equal(sparse_mla_absorbed(site, q_nope[rows], q_rope[rows], chosen[rows], alone, kv), got[rows])
    room = 2**-6 * want.abs().amax((1, 2), keepdim=True)
    assert ((got.float() - want).abs() <= room).all(), (got.float() - want).abs().max()


@pytest.mark.parametrize("name", SETS)
def test_where_all_are_chosen_it_is_dense_attention(name):
    """To the bit: the gathered entries lie in blocks of the same size, in the same order."""
    dims, draw = LATENTS["V3.2"], draw_of(8, LAYOUTS[0])
    sequences = [(1, 300), (2, 90)]
    batch, kv = draw.step(dims.request, sequences, written=True)
    kv_b = draw.normal(dims.heads * (dims.nope + dims.value), dims.latent) / 20
    q_nope, q_rope = draw.normal(3, dims.heads, dims.nope), draw.normal(3, dims.heads, dims.rope)
    chosen = torch.full((3, 400), -1, dtype=torch.int32)
    for row, position in enumerate(batch.positions.tolist()):
        chosen[row, : position + 1] = torch.arange(position + 1)
    assert not hide_others(chosen[:1], 301).any()
    site = View(kv_b=kv_b, dims=dims, scale=0.1, kv=dims.request, top=400)
    with use_instruction_set(name):
        got = sparse_mla_absorbed(site, q_nope, q_rope, chosen, batch, kv)
        assert torch.equal(got, mla_absorbed(site, q_nope, q_rope, batch, kv))


@pytest.mark.parametrize(("top", "sooner"), [(400, [True, False]), (24, [False, False])])
def test_many_query_tokens_in_the_form_that_multiplies_less(top, sooner):
    dims, draw = LATENTS["V3.2"], draw_of(10, LAYOUTS[0])
    sequences = [(90, 0), (20, 350)]
    batch, kv = draw.step(dims.request, sequences, written=True)
    kv_b = draw.normal(dims.heads * (dims.nope + dims.value), dims.latent) / 20
    chosen = draw_positions(draw, batch, top)
    q = draw.normal(110, dims.heads, dims.nope), draw.normal(110, dims.heads, dims.rope)
    op = SparseMLAAbsorbed(kv_b, dims, 0.1, dims.request, top)
    want = op(*(t.float() for t in q), chosen, batch, kv)
    site = View(kv_b=View(weight=kv_b, bias=None), dims=dims, scale=0.1, kv=dims.request, top=top)
    assert [_expands_sooner(site, new, new + before) for new, before in sequences] == sooner
    got = sparse_mla_expanded(site, *q, chosen, batch, kv)
    room = 2**-5 * want.abs().amax((1, 2), keepdim=True)
    assert ((got.float() - want).abs() <= room).all(), (got.float() - want).abs().max()


def test_padded_rows_are_zero():
    dims, draw = LATENTS["odd"], draw_of(9, LAYOUTS[0])
    batch = make_batch([Query([1, 2], 0, [0])], block_tokens=16, device="cpu")
    kv = build(LAYOUTS[0], dims.request, 1)
    padded = SimpleNamespace(
        query_start=torch.tensor([0, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor([2, 0], dtype=torch.int32),
        block_tables=torch.zeros(2, 1, dtype=torch.int32),
    )
    kv.write(batch.slots, draw.normal(2, dims.request.dim))
    site = View(kv_b=draw.normal(dims.heads * 12, dims.latent), dims=dims, scale=0.1, kv=dims.request, top=4)
    chosen = torch.tensor([[0, -1, -1, -1], [1, 0, -1, -1], [5, 6, 7, 8]], dtype=torch.int32)
    q = draw.normal(3, dims.heads, dims.nope), draw.normal(3, dims.heads, dims.rope)
    got = sparse_mla_absorbed(site, *q, chosen, padded, kv)
    assert got[:2].abs().min() > 0 and not got[2].any()
