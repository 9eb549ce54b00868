"""Attention of one KV head, and selections among compressed keys: against their bodies, row by row."""

from dataclasses import replace

import pytest
import torch

from inferplane.ops import CompressedAttention, Draw, IndexDims, IndexSelect, SharedKVAttention
from inferplane.ops.compressed.attention import draw_entries
from inferplane.ops.compressed.draw import draw_caches
from inferplane.types import HOST, CompressedCache, CompressorCache, KVRequest
from inferplane_cpu.kernels.compressed_attention import compressed_attention, shared_kv_attention
from inferplane_cpu.kernels.sparse_attention import COMPRESSED_LAYOUTS, index_select
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SMALL = KVRequest("shared_kv", 1, 48, window=20, rope=16)
REAL = KVRequest("shared_kv", 1, 512, window=128, rope=64)
SEQUENCES = {
    "short": [(1, 0), (1, 2), (1, 3), (8, 11), (2, 17)],
    "long": [(1, 700), (3, 94), (8, 331), (1, 127), (1, 128)],
    "mixed": [(1, 0), (1, 700), (3, 94), (8, 31)],
}


def draw_of(seed, layout=COMPRESSED_LAYOUTS[0]):
    def build(request, blocks):
        made = next(x for x in layouts(request) if x.name == layout)
        return made.build(request, blocks, torch.bfloat16, torch.device(HOST))

    return Draw(seed, torch.bfloat16, build_kv=build)


class Sites:
    """What a kernel reads of its site: the op's fields, and its weights."""

    def __init__(self, op, sinks):
        self.op, self.sinks, self.made = op, sinks, {}

    def __getattr__(self, name):
        return getattr(self.op, name)

    def once(self, key, make, *args):
        return self.made.setdefault(key, make(*args))


def close(got, want):
    return (got.float() - want.float()).abs().max() <= 1.6e-2 * want.float().abs().max()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", COMPRESSED_LAYOUTS)
@pytest.mark.parametrize("request_", [SMALL, REAL], ids=["small", "V4"])
@pytest.mark.parametrize("sequences", [*SEQUENCES.values(), [(70, 0), (33, 90)]], ids=[*SEQUENCES, "many"])
def test_windows_as_the_body(request_, layout, sequences, name):
    draw, heads = draw_of(1, layout), 5
    batch, kv = draw.step(request_, sequences, written=True)
    q, sinks = draw.normal(batch.tokens, heads, request_.dim), draw.normal(heads).float()
    op = SharedKVAttention(heads, request_.dim**-0.5, request_, sinks, "few")
    with use_instruction_set(name):
        assert close(shared_kv_attention(Sites(op, sinks), q, batch, kv), op(q, batch, kv))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rate", [4, 128])
@pytest.mark.parametrize("request_", [SMALL, REAL], ids=["small", "V4"])
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_compressed_entries_as_the_body(request_, rate, sequences, name):
    draw, heads, top = draw_of(2), 5, 24 if rate == 4 else 0
    far = replace(request_, window=None, rate=rate)
    batch, (window, entries) = draw_caches(draw, [(request_, True), (far, True)], sequences)
    q, sinks = draw.normal(batch.tokens, heads, request_.dim), draw.normal(heads).float()
    chosen = draw_entries(draw, batch, rate, top) if top else None
    cache = CompressedCache(window, CompressorCache(window, entries))
    op = CompressedAttention(heads, request_.dim**-0.5, request_, far, sinks, top, "few")
    view = Sites(op, sinks)
    with use_instruction_set(name):
        assert close(compressed_attention(view, q, chosen, batch, cache), op(q, chosen, batch, cache))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", COMPRESSED_LAYOUTS)
@pytest.mark.parametrize("sequences", [*SEQUENCES.values(), [(2, 5), (150, 300)]], ids=[*SEQUENCES, "many"])
def test_selections_among_compressed_keys_are_the_body_s(layout, sequences, name):
    """Of integers, whose products and sums are exact."""
    draw, dims = draw_of(3, layout), IndexDims(19, 24, 16, 33)
    request = replace(dims.request, rate=4)
    batch, kv = draw.step(request, sequences, written=True)
    slots = torch.arange(kv.blocks * kv.block_tokens)
    kv.write(slots, draw.ints(len(slots), 1, dims.dim, below=3).to(torch.bfloat16) - 1)
    q = (draw.ints(batch.tokens, dims.heads, dims.dim, below=3) - 1).to(torch.bfloat16)
    w = (draw.ints(batch.tokens, dims.heads, below=5) - 2).float()
    op = IndexSelect(dims, request, 4)
    with use_instruction_set(name):
        got = index_select(op, q, w, batch, kv)
    if layout == COMPRESSED_LAYOUTS[0]:
        assert torch.equal(got, op(q, w, batch, kv))
    else:
        assert IndexSelect.compare(got, op(q, w, batch, kv)).error <= IndexSelect.tolerance[torch.bfloat16]
