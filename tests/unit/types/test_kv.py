"""Core's paged storage against a dictionary from slot to entry, in every KV dtype and with odd block sizes."""

import pytest
import torch

from inferplane.errors import UsageError
from inferplane.kvcache import KV_DTYPES, paged_layout
from inferplane.types import KVRequest
from tests.unit.support.small import BF16, F32

GQA = KVRequest("gqa", 2, 64, 32)
MLA = KVRequest("mla", 1, 64 * 9)
ODD = KVRequest("mla", 1, 48)
BLOCKS = 7

pytestmark = pytest.mark.parametrize(
    ("request_", "size", "kv_dtype", "dtype"),
    [
        (GQA, 16, "auto", F32),
        (GQA, 1, "auto", BF16),
        (MLA, 3, "auto", BF16),
        (GQA, 16, "fp8", BF16),
        (MLA, 48, "fp8", F32),
        (GQA, 3, "int8", F32),
        (ODD, 16, "int8", BF16),
    ],
    ids=lambda v: v.kind + str(v.entries) if isinstance(v, KVRequest) else str(v).removeprefix("torch."),
)


@pytest.fixture
def kv(request_, size, kv_dtype, dtype):
    """A cache full of numbers of other sequences."""
    cache = paged_layout(size, kv_dtype).build(request_, BLOCKS, dtype, torch.device("cpu"))
    cache.write(torch.arange(BLOCKS * size), *entries(request_, BLOCKS * size, dtype, seed=9))
    return cache


def entries(request, tokens, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, *s, generator=g).mul(3).to(dtype) for s in request.entry_shapes)


def slots_of(table, tokens, size):
    return torch.tensor([table[i // size] * size + i % size for i in range(tokens)])


def held(kv):
    """Everything in the cache, block by block."""
    return kv.read(torch.arange(BLOCKS), BLOCKS * kv.block_tokens)


def groups(value, request):
    """The entries that share a scale: of a head, or 64 of a latent where that divides it."""
    group = value.shape[-1] if request.kind == "gqa" or request.dim % 64 else 64
    return value.float().unflatten(-1, (-1, group))


def test_reads_what_was_written(kv, request_, size, dtype):
    tokens, table = 2 * size + 1, [5, 0, 3]
    values = entries(request_, tokens, dtype)
    order = torch.randperm(tokens)
    kv.write(slots_of(table, tokens, size)[order], *(v[order] for v in values))
    for n in (tokens, tokens - 1, 1):
        got = kv.read(torch.tensor(table, dtype=torch.int32), n)
        assert len(got) == len(values)
        for g, v in zip(got, values):
            assert g.shape == v[:n].shape and g.dtype is dtype
            top = groups(v[:n], request_).abs().amax(-1, keepdim=True)
            error = (groups(g, request_) - groups(v[:n], request_)).abs()
            layout = KV_DTYPES["auto"] if not kv.scales else kv.spec
            rounding = torch.finfo(dtype).eps / 2 if kv.scales else 0  # what it reads is rounded to the plan's dtype
            assert (error <= top * (layout.error * 1.001 + rounding)).all()
            if kv.scales:
                assert error.any(), "a quantized cache that loses nothing is not quantized"


def test_slot_minus_one_is_ignored(kv, request_, size, dtype):
    before = [t.clone() for t in held(kv)]
    values = entries(request_, 4, dtype)
    kv.write(torch.tensor([-1, 2 * size, -1, -1]), *values)
    after = held(kv)
    for b, a in zip(before, after):
        rest = torch.arange(BLOCKS * size) != 2 * size
        assert torch.equal(a[rest], b[rest]) and not torch.equal(a[~rest], b[~rest])
    alone = paged_layout(size).build(request_, 1, dtype, torch.device("cpu"))
    alone.write(torch.full((4,), -1), *(v * torch.nan for v in values))
    assert not any(t.any() for t in alone.read(torch.tensor([0]), size)), "even NaN in padded rows goes nowhere"


def test_what_attention_reads_does_not_depend_on_chunks(kv, request_, size, dtype):
    tokens, table = 3 * size, [4, 1, 6]
    values, slots = entries(request_, tokens, dtype), slots_of(table, tokens, size)
    kv.write(slots, *values)
    whole = [t.clone() for t in kv.read(torch.tensor(table), tokens)]
    for row in torch.randperm(tokens).split(2):
        kv.write(slots[row], *(v[row] for v in values))
    assert all(torch.equal(a, b) for a, b in zip(whole, kv.read(torch.tensor(table), tokens)))


def test_strided_values(kv, request_, size, dtype):
    values = entries(request_, size, dtype)
    wide = [torch.stack((v, -v), -1) for v in values]
    kv.write(torch.arange(size), *values)
    want = [t.clone() for t in kv.read(torch.tensor([0]), size)]
    kv.write(torch.arange(size), *(x[..., 0] for x in wide))
    assert all(torch.equal(a, b) for a, b in zip(want, kv.read(torch.tensor([0]), size)))


def test_copies_of_blocks_see_the_state_before(kv, size):
    before = [t.clone().unflatten(0, (BLOCKS, size)) for t in held(kv)]
    kv.copy_blocks(torch.tensor([1, 2, 5]), torch.tensor([2, 1, 0]))
    for b, a in zip(before, held(kv)):
        assert torch.equal(a.unflatten(0, (BLOCKS, size)), b[[5, 2, 1, 3, 4, 5, 6]])


def test_export_and_load(kv, request_, size, kv_dtype, dtype):
    blocks = torch.tensor([6, 0, 2])
    stored = kv.export(blocks)
    other = paged_layout(size, kv_dtype).build(request_, 4, dtype, torch.device("cpu"))
    other.load(torch.tensor([3, 1, 0]), stored)
    got, want = other.read(torch.tensor([3, 1, 0]), 3 * size), kv.read(blocks, 3 * size)
    assert all(torch.equal(g, w) for g, w in zip(got, want))
    assert not any(t.any() for t in other.read(torch.tensor([2]), size))
    with pytest.raises(UsageError, match=f"{kv.layout} cannot load .*tensors of shapes"):
        other.load(torch.tensor([1, 2]), stored)
    with pytest.raises(UsageError, match="cannot load"):
        other.load(torch.tensor([3, 1, 0]), stored[1:])


def test_bytes_and_names(kv, request_, size, kv_dtype, dtype):
    layout = paged_layout(size, kv_dtype)
    kept = sum(t.numel() * t.element_size() for t in (*kv.entries, *kv.scales))
    assert layout.bytes_per_block(request_, dtype) * (BLOCKS + 1 / size) == kept  # one slot more, for padding
    assert layout.name == kv.layout == f"paged_{size}" + ("" if kv_dtype == "auto" else f"_{kv_dtype}")
    assert kv.block_tokens == layout.block_tokens == size and kv.request == request_
    assert [layout.blocks_for(n) for n in (0, 1, size, size + 1)] == [0, 1, 1, 2]
    for view, t in zip(kv.view_blocks(), kv.entries):
        assert view.shape[:2] == (BLOCKS, size) and view.data_ptr() == t.data_ptr()
