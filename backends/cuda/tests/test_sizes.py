"""Whatever the heads, blocks and query tokens: a kernel written for the device, or a clear reason in explain."""

from __future__ import annotations

import itertools

import pytest
import torch

from inferplane.ops import Attention, MLAAbsorbed, MLADims, MLAExpanded, placeholder
from inferplane.ops.linear import Linear
from inferplane.plugin import Context, Features, KVRequest, paged_layout
from inferplane_cuda.backend import features_of
from inferplane_cuda.kernels import kernels, providers
from inferplane_cuda.kvcache import list_paged_layouts, token_scaled_layout

HEADS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 32, 40, 64, 96, 128)
LAYOUTS = [*list_paged_layouts(), *(paged_layout(n) for n in (1, 16, 48, 128))]
COMPOSED = ("torch", "torch_sdpa")


def answers(op, layout, capability=(9, 0)):
    """Kernels that take an op, and why the others do not."""
    known = {**features_of(capability), **providers.features()}
    ctx = Context(torch.bfloat16, "decode", {r: layout for r in op.kv_requests()}, Features(known))
    offered = [k for k in kernels() if k.op == op.name]
    why = {k.name: k.refusals(op, ctx, op.formats()) for k in offered}
    return [k for k in offered if not why[k.name]], {name: reasons for name, reasons in why.items() if reasons}


def ops():
    for heads in HEADS:
        for nope, rope, value, latent in ((128, 64, 128, 512), (64, 32, 64, 256)):
            d = MLADims(heads, nope, rope, value, latent)
            kv_b = placeholder(heads * (nope + value), latent)
            yield MLAAbsorbed(kv_b, d, 0.1, d.request)
            yield MLAExpanded(Linear(kv_b), d, 0.1, d.request)
        for dim, group, window in itertools.product((64, 80, 128, 256), (1, 4), (None, 4096)):
            for queries in ("few", "many"):
                yield Attention(heads * group, 0.1, KVRequest("gqa", heads, dim, dim, window), queries)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_size_has_a_kernel_or_a_reason(layout):
    on_offer = layout.block_tokens == 64
    for op in ops():
        served, refused = answers(op, layout)
        compiled = [k for k in served if k.provider not in COMPOSED]
        assert served, (op, refused)
        assert bool(compiled) == on_offer, (op, refused)
        assert all(len(reason) > 10 for reasons in refused.values() for reason in reasons)
        if not on_offer:  # the backend offers blocks of 64 tokens alone, so a plan never comes here
            assert any(f"KV layout {layout.name} is not among" in reason for reason in refused["triton:" + op.name])


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_every_architecture_has_a_kernel_or_a_reason(capability):
    for op in ops():
        served, refused = answers(op, LAYOUTS[0], capability)
        compiled = [k.name for k in served if k.provider not in COMPOSED]
        assert served and bool(compiled) == (capability >= (8, 0)), (op, refused)
        if capability < (8, 0):
            assert any("support by Triton's compiler came with 8.0" in r for r in refused["triton:" + op.name])


def test_latents_for_fp8_products_have_kernels_by_a_pin():
    dims = MLADims(16, 128, 64, 128, 512)
    op = MLAAbsorbed(placeholder(16 * 256, 512), dims, 0.1, dims.request)
    served, _ = answers(op, token_scaled_layout())
    assert {k.provider for k in served} == {"gluon_fp8", "torch_sdpa"}
