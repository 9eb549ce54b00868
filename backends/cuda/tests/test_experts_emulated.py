"""Hopper's FP8 product by experts, its own source run on the host, against the op. See `gluon_emulator`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backends.cuda.tests import gluon_emulator
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import MoEExperts, Quantize, SiluMul, encode, placeholder
from inferplane.ops.formats import dequantize_rows
from inferplane.ops.op import relative_error
from inferplane_cuda.kernels import FP8_ERROR, kernels

PACKAGE = "inferplane_cuda.kernels.hopper"
EXPERTS, TOP_K, WIDTH, INNER = 4, 2, 208, 256
"""A width that fills neither a tile nor a block."""
EXPERT = {"even": None, "one_for_all": 2, "nobody": -1}


def dealt(ids, experts, rows):
    """What the portable kernel gives: slots of whole blocks, expert by expert, and each block's expert; then blocks
    that nobody needs, whose slots hold anything."""
    slots, owners, flat = [], [], ids.flatten()
    for expert in range(experts):
        pairs = torch.where(flat == expert)[0].tolist()
        blocks = -(-len(pairs) // rows)
        slots += pairs + [flat.numel()] * (blocks * rows - len(pairs))
        owners += [expert] * blocks
    return torch.tensor(slots + [2**30] * rows, dtype=torch.int32), torch.tensor([*owners, -1], dtype=torch.int32)


def summed(parts, ids, dtype):
    here = torch.where(ids.flatten()[:, None] < 0, 0, parts)
    return here.view(*ids.shape, -1).sum(1).to(dtype)


@pytest.fixture(params=[False, True], ids=["at_once", "late"])
def hopper(request, monkeypatch):
    """The module, whose portable parts are the ops' own bodies."""
    with gluon_emulator.emulated(PACKAGE, "experts", "gluon_compat") as (module, tma):
        monkeypatch.setattr(gluon_emulator.STATE, "late", request.param)
        monkeypatch.setattr(
            module, "tma_descriptor", lambda t, rows, columns, bits: tma.TensorDescriptor(t, [rows, columns])
        )
        monkeypatch.setattr(module, "assign_blocks", dealt)
        monkeypatch.setattr(module, "sum_pairs", summed)
        monkeypatch.setattr(module, "MAX_PORTABLE_ROWS", 0)
        coding = Quantize("fp8", 128)
        monkeypatch.setattr(
            module, "quantize_rows_to_fp8", lambda x, group: module.make_quantized_input(*coding(x), group, x.dtype)
        )
        monkeypatch.setattr(module, "activation_mul_quantize", lambda x, how, group: coding(SiluMul()(x.nan_to_num(0))))
        monkeypatch.setattr(torch, "empty", poisoned)
        yield module


def poisoned(*shape, dtype=None, device=None, real=torch.empty):
    made = real(*shape, dtype=dtype, device=device)
    return made.fill_(torch.nan) if made.is_floating_point() and made.element_size() > 1 else made


def weights(generator):
    return [
        encode(torch.randn(EXPERTS, *shape, generator=generator) / shape[1] ** 0.5, "fp8_block")
        for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))
    ]


@pytest.mark.parametrize("routing", EXPERT)
@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
@pytest.mark.parametrize("tokens", [1, 130])
def test_agrees_with_the_op(hopper, tokens, outliers, routing, record_property):
    generator = torch.Generator().manual_seed(tokens)
    gate_up, down = weights(generator)
    x = torch.randn(tokens, WIDTH, generator=generator)
    if outliers:
        x[:, ::53] *= 30
    x = x.bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(tokens)])
    if EXPERT[routing] is not None:
        ids = torch.full_like(ids, EXPERT[routing])
    share = torch.rand(tokens, TOP_K, generator=generator)
    p = SimpleNamespace(gate_up=pack(gate_up), down=pack(down))
    got = hopper.moe_experts(p, x, share, ids)
    op = MoEExperts(placeholder(EXPERTS, 2 * INNER, WIDTH), placeholder(EXPERTS, WIDTH, INNER))
    want = MoEExperts(gate_up.dequantize(), down.dequantize())(x.float(), share, ids)
    error, tolerance = relative_error(got, want), op.tolerance[torch.bfloat16] + FP8_ERROR
    record_property("op", "moe_experts")
    record_property("kernel", "gluon_fp8:moe_experts")
    record_property("error", error)
    record_property("tolerance", tolerance)
    assert got.dtype is torch.bfloat16 and error <= tolerance


@pytest.mark.parametrize("counts", [(0, 128, 5), (256, 0, 0), (0, 0, 0), (130, 255, 1)])
def test_masked_groups(hopper, counts):
    from inferplane.kernels.triton.experts.blocks import assign_masked_blocks

    generator, capacity = torch.Generator().manual_seed(3), 256
    stack = encode(torch.randn(len(counts), 200, WIDTH, generator=generator), "fp8_block")
    x = torch.randn(len(counts) * capacity, WIDTH, generator=generator)
    data, scale = Quantize("fp8", 128)(x)
    slots = assign_masked_blocks(torch.tensor(counts, dtype=torch.int32), capacity, 128)
    got = hopper.multiply_grouped(
        hopper.make_quantized_input(data, scale, 128, torch.bfloat16), pack(stack), slots, len(x)
    )
    values, weight = dequantize_rows(data, scale, 128).view(len(counts), capacity, -1), stack.dequantize()
    for e, count in enumerate(counts):
        want = values[e, :count] @ weight[e].t()
        rows = got.view(len(counts), capacity, -1)[e, :count].float()
        assert rows.shape == want.shape
        torch.testing.assert_close(rows, want, rtol=0, atol=0.008 * max(1.0, want.abs().max().item() if count else 1.0))


def test_another_experts_scales_are_seen(hopper):
    """Errors of a scale are far beyond what the test above lets pass."""
    generator = torch.Generator().manual_seed(5)
    gate_up, down = weights(generator)
    x, share = torch.randn(40, WIDTH, generator=generator).bfloat16(), torch.ones(40, 1)
    ids = torch.full((40, 1), 1)
    good = hopper.moe_experts(SimpleNamespace(gate_up=pack(gate_up), down=pack(down)), x, share, ids).float()
    down.scale[1, 0, 1] *= 1.5
    bad = hopper.moe_experts(SimpleNamespace(gate_up=pack(gate_up), down=pack(down)), x, share, ids).float()
    assert relative_error(bad, good) > 0.1


def test_few_rows_and_finer_blocks_go_to_the_portable_kernel(monkeypatch):
    with gluon_emulator.emulated(PACKAGE, "experts") as (module,):
        taken = []
        monkeypatch.setattr(module, "portable", lambda p, x, w, ids: taken.append(len(ids)))
        p = SimpleNamespace(gate_up=pack(encode(torch.ones(4, 256, 128), "fp8_block")), down=SimpleNamespace(rows=128))
        module.moe_experts(p, None, None, torch.zeros(128, 2, dtype=torch.int64))
        p.down.rows = 64
        module.moe_experts(p, None, None, torch.zeros(300, 2, dtype=torch.int64))
        assert taken == [128, 300]


def test_it_is_taken_by_a_pin_until_a_gpu_has_run_it():
    (kernel,) = [k for k in kernels() if k.name == "gluon_fp8:moe_experts"]
    portable = next(k for k in kernels() if k.name == "triton_fp8:moe_experts_fp8")
    assert (
        kernel.rank < portable.rank
        and kernel.quantizes_activations_to == portable.quantizes_activations_to == "fp8"
        and "not run" in kernel.note
    )
