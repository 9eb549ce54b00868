"""The layout with static scales: what is stored, by whose scales, and that checks, copies and shares keep them."""

import pytest
import torch

from inferplane.binding.layout_canary import check_layout
from inferplane.errors import UsageError
from inferplane.kvcache import StaticKV, paged_layout, static_layout
from inferplane.types import KVCache, KVRequest
from tests.unit.support.small import F32

GQA, MLA = KVRequest("gqa", 2, 32, 32), KVRequest("mla", 1, 576)
DEVICE = torch.device("cpu")
BLOCKS = torch.tensor([0, 1])


def build(kv_dtype, request=GQA, dtype=F32):
    return static_layout(4, kv_dtype).build(request, 2, dtype, DEVICE)


@pytest.mark.parametrize("request_", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_the_check_of_layouts(kv_dtype, request_, dtype):
    assert not check_layout(static_layout(16, kv_dtype), request_, dtype, "cpu")


@pytest.mark.parametrize(("kv_dtype", "limit"), [("fp8", 448.0), ("int8", 127.0)])
def test_an_entry_is_stored_divided_by_its_scale_and_saturates(kv_dtype, limit):
    kv = build(kv_dtype).with_scales((0.5, 0.25))
    k, v = torch.full((1, 2, 32), 3.0), torch.full((1, 2, 32), 1e6)
    kv.write(torch.tensor([1]), k, -v)
    stored_k, stored_v = (t.float() for t in kv.export(BLOCKS))
    assert stored_k[0, 1].unique().tolist() == [6.0] and stored_v[0, 1].unique().tolist() == [-limit]
    read_k, read_v = kv.read(BLOCKS, 2)
    assert read_k[1].unique().tolist() == [3.0] and read_v[1].unique().tolist() == [-limit * 0.25]


def test_scales_of_two_layers_in_one_memory_are_apart():
    """Layers in different block tables share memory, not scales."""
    kv = build("int8")
    other = kv.share(KVRequest("gqa", 2, 32, 32, window=5)).with_scales((1.0, 1.0))
    one = kv.with_scales((0.1, 0.1))
    rows = torch.ones(1, 2, 32)
    one.write(torch.tensor([0]), rows, rows)
    other.write(torch.tensor([4]), rows, rows)
    assert one.read(BLOCKS, 5)[0][[0, 4], 0, 0].tolist() == pytest.approx([1.0, 0.1])
    assert other.read(BLOCKS, 5)[0][[0, 4], 0, 0].tolist() == [10.0, 1.0]
    assert kv.scale_values == (1 / 8, 1 / 8)
    assert KVCache((one, other), 2, 4).storages() == [kv]


def test_blocks_are_copied_and_loaded_as_they_are_stored():
    kv = build("int8").with_scales((0.03, 0.07))
    rows = torch.randn(4, 2, 32)
    kv.write(torch.arange(4), rows, rows)
    before = kv.read(torch.tensor([0]), 4)
    kv.shares.copy_blocks(torch.tensor([0]), torch.tensor([1]))
    again = build("int8").with_scales((0.03, 0.07))
    again.load(torch.tensor([1]), kv.export(torch.tensor([1])))
    for cache in (kv, again):
        assert all(torch.equal(a, b) for a, b in zip(cache.read(torch.tensor([1]), 4), before))


def test_what_cannot_be():
    with pytest.raises(UsageError, match="'int4' with static scales"):
        static_layout(16, "int4")
    with pytest.raises(UsageError, match="1 scales for 2"):
        build("fp8").with_scales((1.0,))
    with pytest.raises(UsageError, match="paged_4 has no static scales"):
        paged_layout(4).build(GQA, 1, F32, DEVICE).with_scales((1.0, 1.0))


def test_takes_half_of_16_bits_and_says_so():
    layout = static_layout(16, "int8")
    kv = layout.build(GQA, 3, F32, DEVICE)
    assert isinstance(kv, StaticKV) and layout.has_static_scales and not paged_layout(16, "int8").has_static_scales
    assert 3 * layout.bytes_per_block(GQA, F32) == sum(t.nbytes for t in kv.list_tensors())
