"""K and V in int8 with static scales: who serves them, when they are on offer, what is stored, and long sequences."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.binding.layout_canary import check_layout
from inferplane.engine import InferplaneWarning
from inferplane.ops.attention import Attention
from inferplane.ops.draw import Draw
from inferplane.plugin import KVRequest
from inferplane.types.batch import Query, make_batch
from inferplane_gcu.kernels import attention_int8
from inferplane_gcu.kvcache import PAGED_HEADS, STATIC_INT8, layouts
from tests.vendors.configs import FAMILIES
from tests.vendors.engine import serve
from tests.vendors.every.checkpoints import write_checkpoint
from tests.vendors.gcu import emulated
from tests.vendors.profile import DRAFTS, in_vendor_dtypes

pytestmark = in_vendor_dtypes
assert emulated.EMULATOR, "its operators are there, whichever test is the first"
DTYPE, DEVICE = torch.bfloat16, torch.device("cpu")
REQUEST = KVRequest("gqa", 2, 64, 64)
NAMES = {"vllm_gcu:kv_write_int8", "vllm_gcu:attention_few_int8", "flash_attn:attention_many_int8"}
SCALES = (0.043, 0.021)


def int8_layouts(request):
    return [x for x in layouts(request) if x.kv_dtype == "int8"]


def build(blocks=2):
    return int8_layouts(REQUEST)[-1].build(REQUEST, blocks, DTYPE, DEVICE).with_scales(SCALES)


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("family", ["llama", "llama_head_64"])
def test_serves(family, speculative):
    """Chunks of a long prompt, single tokens and drafts share steps, without a hot op on torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve("gcu", DTYPE, family, strict=True, kv_cache_dtype="int8", speculative_config=speculative)
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {STATIC_INT8}
    assert {s["chosen"]["kernel"] for s in plan["sites"] if s["op"] in ("attention", "kv_write")} == NAMES


def run(folder, device, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)
        with LLM(folder, device=device, dtype="bfloat16", max_model_len=256, **options) as llm:
            layout = {x["layout"] for x in llm.explain()["kv_layouts"]}
            scales = [getattr(kv, "scale_values", None) for kv in llm.engine.runner.cache.layers]
            found = llm.generate([list(range(3, 83))], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
            return layout, scales, llm.logits(list(range(3, 83)))[0].float(), found[0].token_ids


def test_a_checkpoint_decides(tmp_path):
    """Without scales a scale a token serves, and torch; with them the vendor's operators, as the cpu computes it."""
    plain, fp8, int8 = (write_checkpoint(tmp_path / d, FAMILIES["llama"], d, SCALES) for d in ("", "fp8", "int8"))
    assert run(plain, "gcu", kv_cache_dtype="int8")[0] == run(fp8, "gcu", kv_cache_dtype="int8")[0] == {"paged_64_int8"}
    layout, scales, logits, tokens = run(int8, "gcu", kv_cache_dtype="int8")
    assert layout == {STATIC_INT8} and len(tokens) == 8
    assert scales == [pytest.approx([s * n for s in SCALES]) for n in (1, 2)]
    _, same, by_torch, _ = run(int8, "cpu", kv_cache_dtype="int8_static")
    assert same == scales
    assert (logits - by_torch).norm() < 0.05 * by_torch.norm()


@pytest.mark.parametrize("heads", PAGED_HEADS)
def test_the_layout_passes_the_check_of_layouts(heads):
    request = KVRequest("gqa", 2, heads, heads)
    assert not check_layout(int8_layouts(request)[-1], request, DTYPE, "cpu")


def test_heads_that_the_vendor_does_not_read_have_a_scale_a_token():
    for request in (KVRequest("gqa", 2, 120, 120), KVRequest("gqa", 2, 64, 128), KVRequest("mla", 1, 576)):
        assert [x.name for x in int8_layouts(request)] == ["paged_64_int8"]


def test_the_kernel_stores_what_the_layout_stores():
    """Byte for byte, entries that saturate and padded rows included."""
    draw = Draw(4, DTYPE)
    batch = make_batch([Query([1, 2, 3], 62, [1, 0], 1)], block_tokens=64, device="cpu", few_tokens=8)
    batch.slots[1] = -1
    rows = [draw.normal(3, 2, 64) * 4 for _ in range(2)]
    one, other = build(), build()
    one.write(batch.slots, *rows)
    attention_int8.kv_write_int8(SimpleNamespace(), *rows, batch, other)
    for a, b in zip(one.list_tensors(), other.list_tensors(), strict=True):
        assert torch.equal(a, b.clamp_min(-127)) and int(a.max()) == 127  # whether -128 is used is not published


@pytest.mark.parametrize("longest", [100, 600, 9000])
def test_paged_attention_of_long_sequences(longest):
    """By v1 and by v2, whose choice is the vendor's."""
    blocks = -(-longest // 64)
    kv, draw = build(blocks), Draw(5, DTYPE)
    kv.write(torch.arange(longest), *(draw.normal(longest, 2, 64) for _ in range(2)))
    batch = make_batch([Query([1], longest - 1, list(range(blocks)), 1)], block_tokens=64, device="cpu", few_tokens=8)
    op, q = Attention(4, 0.125, REQUEST, "few"), draw.normal(1, 4, 64)
    got = attention_int8.attention_few_int8(SimpleNamespace(scale=op.scale, kv=REQUEST), q, batch, kv)
    torch.testing.assert_close(got.float(), op(q, batch, kv).float(), atol=4e-3, rtol=0.02)
