"""The cache in FP8: which kernels serve it, what is stored, and what the vendor's attention does not read."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from inferplane.engine import InferplaneWarning
from inferplane.ops.draw import Draw
from inferplane.plugin import KVRequest, StaticKV
from inferplane.types.batch import Query, make_batch
from inferplane_xpu.intel.kernels import fp8_cache
from inferplane_xpu.intel.kvcache import BLOCK_TOKENS, PAGED_FP8, layouts
from tests.vendors.configs import FAMILIES
from tests.vendors.engine import serve
from tests.vendors.every.static_scales import check_fp8
from tests.vendors.intel import emulated
from tests.vendors.profile import DRAFTS, in_vendor_dtypes

pytestmark = in_vendor_dtypes
assert emulated.EMULATOR, "its operators are there, whichever test is the first"
DTYPE = torch.bfloat16
FP8, LARGEST = torch.float8_e4m3fn, 448.0
SCALES = (1.0, 1.0), (0.37, 2.5)
"""Of K and V."""
GQA, MLA = KVRequest("gqa", 2, 64, 64), KVRequest("mla", 1, 576)
SERVED = {
    "llama": {"kv_write_fp8", "attention_few_fp8", "attention_many_fp8"},
    "llama_head_64": {"kv_write_fp8", "attention_few_fp8", "attention_many_fp8"},
    "mistral_window": {"kv_write_fp8", "attention_few_fp8", "attention_many_fp8"},
    "deepseek_v3": {"mla_kv_write_fp8", "mla_absorbed_fp8", "mla_expanded_fp8"},
}


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("family", SERVED)
def test_serves(family, speculative):
    """Chunks of a long prompt, single tokens and drafts share steps, without a hot op on torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve("xpu:intel", DTYPE, family, strict=True, kv_cache_dtype="fp8", speculative_config=speculative)
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {PAGED_FP8}
    ops = ("attention", "kv_write", "mla_kv_write", "mla_absorbed", "mla_expanded")
    chosen = {s["chosen"]["kernel"] for s in plan["sites"] if s["op"] in ops}
    assert chosen == {f"vllm_xpu:{name}" for name in SERVED[family]}


def build(request, scales):
    kv = StaticKV(request, 2, BLOCK_TOKENS, PAGED_FP8, DTYPE, torch.device("cpu"))
    return kv.with_scales(scales[: len(request.entry_shapes)])


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("request_", [GQA, MLA], ids=["gqa", "mla"])
def test_kernels_store_what_the_layout_stores(request_, scales):
    """Byte for byte, entries beyond the format's largest and padded rows included."""
    draw = Draw(4, DTYPE)
    batch = make_batch([Query([1, 2, 3], 62, [1, 0], 1)], block_tokens=64, device="cpu", few_tokens=8)
    batch.slots[1] = -1
    rows = [draw.normal(3, *shape) * 300 for shape in request_.entry_shapes]
    assert max(float(row.abs().max()) / scale for row, scale in zip(rows, scales)) > LARGEST
    one, other = (build(request_, scales) for _ in range(2))
    one.write(batch.slots, *rows)
    if request_.kind == "mla":
        latent, k_rope = rows[0].split((512, 64), -1)
        fp8_cache.mla_kv_write_fp8(SimpleNamespace(), latent, k_rope, batch, other)
    else:
        fp8_cache.kv_write_fp8(SimpleNamespace(), *rows, batch, other)
    for a, b in zip(one.list_tensors(), other.list_tensors(), strict=True):
        assert a.dtype is FP8 and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and a.float().abs().sum() > 0


def test_a_checkpoints_scales_are_taken(tmp_path):
    check_fp8(tmp_path, "xpu:intel", FAMILIES["llama"], PAGED_FP8, (0.05, 0.03))


def test_head_sizes_that_the_vendor_does_not_read_are_in_cores_fp8():
    """So that a model with such heads is served, by torch, with a scale a token and head."""
    assert [x.name for x in layouts(KVRequest("gqa", 2, 80, 80)) if x.kv_dtype == "fp8"] == ["paged_64_fp8"]
    assert [x.name for x in layouts(KVRequest("gqa", 2, 64, 128)) if x.kv_dtype == "fp8"] == ["paged_64_fp8"]
    assert [x.name for x in layouts(GQA) if x.kv_dtype == "fp8"] == ["paged_64_fp8", PAGED_FP8]
