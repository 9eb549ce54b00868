"""Latents in FP8: which kernels serve them, what is stored, and where they are refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from inferplane.engine import InferplaneWarning
from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.plugin import Context, KVRequest, StaticKV
from inferplane.types.batch import Query, make_batch
from inferplane_dcu.chips import features_of
from inferplane_dcu.kernels import kernels, mla_fp8
from inferplane_dcu.kvcache import LATENTS_FP8, layouts
from tests.vendors.configs import FAMILIES
from tests.vendors.dcu import chip, emulated
from tests.vendors.engine import serve
from tests.vendors.every.static_scales import check_fp8
from tests.vendors.profile import DRAFTS

pytestmark = chip.whole
assert emulated.EMULATOR, "its operators are there, whichever test is the first"
BF16 = torch.bfloat16
LARGEST = 448.0
REQUEST = KVRequest("mla", 1, 576, rope=64)


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_serves(speculative):
    """Chunks of a long prompt, single tokens and drafts share steps, without a hot op on torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve("dcu", BF16, "deepseek_v3", strict=True, kv_cache_dtype="fp8", speculative_config=speculative)
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {LATENTS_FP8}
    ops = ("mla_kv_write", "mla_absorbed", "mla_expanded")
    chosen = {s["chosen"]["kernel"] for s in plan["sites"] if s["op"] in ops}
    assert chosen == {"hcu_ops:mla_kv_write_fp8", "flash_mla:mla_absorbed_fp8", "flash_attn:mla_expanded_fp8"}


@pytest.mark.parametrize("scale", [1.0, 0.37, 2.5])
def test_entries_that_the_vendors_write_would_make_no_numbers_are_clamped(scale):
    """Byte for byte what the layout's own write stores; a padded row is skipped."""
    batch = make_batch([Query([1, 2, 3], 62, [1, 0], 1)], block_tokens=64, device="cpu", few_tokens=8)
    batch.slots[1] = -1
    row = Draw(4, BF16).normal(3, 576) * 900
    assert float(row.abs().max()) > LARGEST * scale
    made = (StaticKV(REQUEST, 2, 64, LATENTS_FP8, BF16, torch.device("cpu")) for _ in range(2))
    one, other = (kv.with_scales((scale,)) for kv in made)
    one.write(batch.slots, row)
    mla_fp8.mla_kv_write_fp8(SimpleNamespace(), *row.split((512, 64), -1), batch, other)
    (a,), (b,) = one.list_tensors(), other.list_tensors()
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.isfinite(b.float()).all() and float(b.float().abs().max()) == LARGEST


def test_a_checkpoints_scales_are_taken(tmp_path):
    check_fp8(tmp_path, "dcu", FAMILIES["deepseek_v3"], LATENTS_FP8, (0.05,))


def test_refused_on_gfx938():
    """Whose queries would be in FP8 too."""
    (kernel,) = [k for k in kernels() if k.name == "flash_mla:mla_absorbed_fp8"]
    (sample,) = [s for s in OPS["mla_absorbed"].samples() if s.label == "v3_dims"]
    (request,) = sample.op.kv_requests()
    chosen = {request: next(x for x in layouts(request) if x.name == LATENTS_FP8)}

    def refusals(gfx):
        return kernel.refusals(sample.op, Context(BF16, "decode", chosen, features=features_of(gfx)), {"plain"})

    assert not refusals("gfx936")
    assert "queries are in FP8 too" in " ".join(refusals("gfx938"))


def test_k_and_v_have_no_layout_in_fp8():
    assert {x.kv_dtype for x in layouts(KVRequest("gqa", 2, 64, 64))} == {"auto", "int8"}
    assert [x.name for x in layouts(REQUEST) if x.kv_dtype == "fp8"] == ["paged_64_fp8", LATENTS_FP8]
