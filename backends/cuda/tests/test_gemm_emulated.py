"""Hopper's FP8 product, its own source run on the host, against the op. See `gluon_emulator`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backends.cuda.tests import gluon_emulator
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import Quantize
from inferplane.ops.formats import dequantize_rows, encode

PACKAGE = "inferplane_cuda.kernels.hopper"
QUANTIZE = Quantize("fp8", 128)


@pytest.fixture(params=[False, True], ids=["at_once", "late"])
def gemm(request, monkeypatch):
    with gluon_emulator.emulated(PACKAGE, "gemm", "gluon_compat") as (module, tma):
        monkeypatch.setattr(gluon_emulator.STATE, "late", request.param)
        module.descriptor = tma.TensorDescriptor
        yield module


def operands(rows, outputs, depth, outliers):
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, depth, generator=generator)
    if outliers:
        x[:, ::53] *= 50
        x[rows // 2] *= 1e-4
    return x.bfloat16(), encode(torch.randn(outputs, depth, generator=generator), "fp8_block")


def run(gemm, x, weight, columns):
    data, scale = QUANTIZE(x)
    packed = pack(weight)
    (rows, depth), outputs = x.shape, packed.outputs
    out = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
    tiles = -(-rows // 128) * -(-outputs // columns)
    stored = packed.data.view(torch.float8_e4m3fn)
    gemm.product[(tiles,)](
        gemm.descriptor.from_tensor(data, [128, 128], None), gemm.descriptor.from_tensor(stored, [columns, 128], None),
        scale, packed.scale, out, rows, outputs, -(-depth // 128),
        COLUMNS=columns, RASTER=2, STAGES=3, num_warps=4,
    )  # fmt: skip
    want = dequantize_rows(data, scale, 128) @ weight.dequantize().t()
    return out.float(), want


@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "columns"),
    [(1, 64, 128, 64), (65, 200, 336, 128), (130, 320, 1040, 64), (400, 520, 640, 128)],
)
def test_agrees_with_the_op(gemm, rows, outputs, depth, columns, outliers, record_property):
    got, want = run(gemm, *operands(rows, outputs, depth, outliers), columns)
    # row by row: one of them is a ten-thousandth of the others
    error = max(((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, want, strict=True))
    record_property("op", "linear")
    record_property("kernel", "gluon_fp8:linear")
    record_property("error", error)
    record_property("tolerance", 0.008)
    assert error <= 0.008


def test_a_scale_that_is_not_applied_is_seen(gemm):
    x, weight = operands(65, 128, 256, True)
    weight.scale[0, 1] *= 1.1
    got, _ = run(gemm, x, weight, 128)
    weight.scale[0, 1] /= 1.1
    _, want = run(gemm, x, weight, 128)
    assert (got - want).abs().max() > 0.008 * want.abs().max()


def test_tiles_are_as_wide_as_fills_the_device():
    with gluon_emulator.emulated(PACKAGE, "linear") as (linear,):
        assert linear.choose_columns(4096, 7168, 132) == 128
        assert linear.choose_columns(128, 2112, 132) == 64
        assert linear.choose_columns(4096, 24576, 132) == 128


def test_few_rows_and_finer_blocks_go_to_the_portable_kernel(monkeypatch):
    with gluon_emulator.emulated(PACKAGE, "linear") as (linear,):
        taken = []
        monkeypatch.setattr(linear, "portable", lambda x, weight, prepared: taken.append(len(x.data)))
        weight = SimpleNamespace(rows=128)
        linear.matmul_fp8_blocks(SimpleNamespace(data=torch.empty(64, 128)), weight, None)
        linear.matmul_fp8_blocks(SimpleNamespace(data=torch.empty(500, 128)), SimpleNamespace(rows=32), None)
        assert taken == [64, 500]
