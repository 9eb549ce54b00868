"""Latent attention with a kv_b of 8 and 4 bits: against its oracle in odd sizes, and row by row."""

from types import SimpleNamespace

import pytest
import torch

from inferplane.binding import View
from inferplane.ops import OPS, Draw, encode
from inferplane.ops.mla import MLADims
from inferplane.types import HOST
from inferplane_cpu.kernels.attention import LAYOUTS, mla_absorbed, mla_absorbed_panels, mla_expanded_panels
from inferplane_cpu.kernels.packing import LATENT_FORMATS, Panels
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SIZES = {
    "whole panels": MLADims(2, 32, 16, 48, 128),
    "heads share panels": MLADims(5, 23, 16, 37, 160),
    "less than a panel": MLADims(3, 7, 16, 5, 64),
    "a rest of columns": MLADims(2, 128, 64, 128, 544),
}
SEQUENCES = [(1, 0), (1, 90), (3, 64), (6, 31)]


def site(dims, kv_b):
    return View(kv_b=kv_b, dims=dims, scale=(dims.nope + dims.rope) ** -0.5, kv=dims.request)


def case(dims, layout, seed, sequences=SEQUENCES):
    """A step's queries, so large that each of their entries tells in the result, batch and cache."""
    draw = Draw(
        seed, torch.bfloat16, build_kv=lambda r, blocks: layouts_named(layout).build(r, blocks, torch.bfloat16, HOST)
    )
    batch, kv = draw.step(dims.request, sequences, written=True)
    tokens = sum(n for n, _ in sequences)
    q_nope, q_rope = draw.normal(tokens, dims.heads, dims.nope), draw.normal(tokens, dims.heads, dims.rope)
    return q_nope * 4, q_rope, batch, kv


def layouts_named(name):
    return next(x for x in layouts() if x.name == name)


def weight(dims, format, seed=5):
    shape = dims.heads * (dims.nope + dims.value), dims.latent
    return encode(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 20, format)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", LATENT_FORMATS)
@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_against_the_dequantized_weight(dims, format, layout, name):
    q = weight(dims, format)
    op = OPS["mla_absorbed"](q.dequantize(torch.float32), dims, (dims.nope + dims.rope) ** -0.5, dims.request)
    for seed in (1, 2):
        q_nope, q_rope, batch, kv = case(dims, layout, seed)
        want = op(q_nope.float(), q_rope.float(), batch, kv)
        with use_instruction_set(name):
            got = mla_absorbed_panels(site(dims, Panels(q)), q_nope, q_rope, batch, kv).float()
            rounded = mla_absorbed(site(dims, q.dequantize(torch.bfloat16)), q_nope, q_rope, batch, kv).float()
        room = 2**-6 * want.abs().amax((1, 2), keepdim=True)  # bf16 between folding, attention and unfolding
        assert ((got - want).abs() <= room).all(), (got - want).abs().max()
        assert ((rounded - want).abs() <= room).all(), "the bar itself"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", ["int8_group", "int8_group32", "int4_group32"])
def test_a_row_is_the_same_whoever_is_beside_it(format, name):
    dims = SIZES["heads share panels"]
    panels = Panels(weight(dims, format))
    q_nope, q_rope, batch, kv = case(dims, LAYOUTS[0], 3)
    with use_instruction_set(name):
        whole = mla_absorbed_panels(site(dims, panels), q_nope, q_rope, batch, kv)
        for i, (n, start) in enumerate(SEQUENCES):
            first = sum(n for n, _ in SEQUENCES[:i])
            alone = SimpleNamespace(
                query_start=torch.tensor([0, n], dtype=torch.int32),
                seq_lens=batch.seq_lens[i : i + 1].clone(),
                block_tables=batch.block_tables[i : i + 1],
            )
            rows = slice(first, first + n)
            got = mla_absorbed_panels(site(dims, panels), q_nope[rows], q_rope[rows], alone, kv)
            assert torch.equal(got, whole[rows]), start


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", LATENT_FORMATS)
@pytest.mark.parametrize("sequences", [SEQUENCES, [(70, 0)], [(65, 17), (9, 0)]], ids=["few", "prompt", "chunks"])
@pytest.mark.parametrize("dims", [SIZES["whole panels"], SIZES["heads share panels"]], ids=["whole", "shared"])
def test_expanded_for_many_tokens(dims, sequences, format, name):
    q = weight(dims, format)
    q_nope, q_rope, batch, kv = case(dims, LAYOUTS[0], 4, sequences)
    op = OPS["mla_absorbed"](q.dequantize(torch.float32), dims, (dims.nope + dims.rope) ** -0.5, dims.request)
    want = op(q_nope.float(), q_rope.float(), batch, kv)
    with use_instruction_set(name):
        got = mla_expanded_panels(site(dims, View(weight=Panels(q), prepared=None)), q_nope, q_rope, batch, kv).float()
    assert ((got - want).abs() <= 2**-6 * want.abs().amax((1, 2), keepdim=True)).all()


@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_the_bar_shows_one_wrong_row_of_a_head(dims):
    """The bar of the tests above, held to a kv_b of which one row that is folded has another sign."""
    q = weight(dims, "int8_group")
    scale = (dims.nope + dims.rope) ** -0.5
    q_nope, q_rope, batch, kv = case(dims, LAYOUTS[0], 1)
    want = OPS["mla_absorbed"](q.dequantize(torch.float32), dims, scale, dims.request)(
        q_nope, q_rope, batch, kv
    ).float()
    for row in range(dims.nope):
        wrong = q.dequantize(torch.float32)
        wrong[row] *= -1
        got = OPS["mla_absorbed"](wrong, dims, scale, dims.request)(q_nope, q_rope, batch, kv).float()
        assert ((got - want).abs() > 2**-6 * want.abs().amax((1, 2), keepdim=True)).any(), row
