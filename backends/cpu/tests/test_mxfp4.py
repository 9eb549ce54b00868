"""MXFP4 in panels: products with the values that are stored, their bytes, scales of any kind, and what is refused."""

from dataclasses import replace

import pytest
import torch

from inferplane.ops import encode
from inferplane.plugin import KernelError
from inferplane.types import QTensor
from inferplane_cpu.kernels.linear import multiply, multiply_on_tiles
from inferplane_cpu.kernels.packing import Panels, expand_rows, pack_mxfp4
from inferplane_cpu.native import MXFP4, instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SIZES = [(17, 32), (48, 96), (100, 70), (256, 512)]


def weight(n, k):
    return encode(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), "mxfp4")


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("size", SIZES)
def test_products_with_the_stored_values(size, name):
    n, k = size
    q, draw = weight(n, k), torch.Generator().manual_seed(1)
    values, panels = q.dequantize(), pack_mxfp4(q)
    with use_instruction_set(name):
        assert torch.equal(expand_rows(panels.matrices[0], 0, n), values.bfloat16())
        for rows in (1, 2, 3, 7, 20, 70):
            x = torch.randn(rows, k, generator=draw).bfloat16()
            want, many = x.float() @ values.T, torch.empty(rows, n)
            assert (multiply(panels.matrices[0], x, True) - want).abs().max() <= 1e-4 * want.abs().max()
            if multiply_on_tiles(panels.matrices[0], x, many):
                assert (many - want).abs().max() <= 5e-3 * want.abs().max()


def test_bytes_of_experts():
    stack = encode(torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(2)), "mxfp4")
    assert pack_mxfp4(stack).nbytes == 3 * 64 * (256 // 2 + 256 // 32)


@pytest.mark.parametrize("scale", [0.3, 2.0**-130, float("nan")])
@pytest.mark.parametrize("name", SETS)
def test_scales_of_any_kind(name, scale):
    q = weight(32, 64)
    q.scale[5, 1] = scale
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    want = x.float() @ q.dequantize().T
    with use_instruction_set(name):
        got = multiply(pack_mxfp4(q).matrices[0], x, True)
    assert torch.equal(got.isnan(), want.isnan())
    assert (got - want).nan_to_num().abs().max() <= 1e-4 * want.nan_to_num().abs().max()


def test_other_entries_are_refused():
    q = weight(32, 64)
    data = q.data.clone()
    data[31, 63] = 5
    with pytest.raises(KernelError, match="other entries"):
        pack_mxfp4(QTensor(data, q.scale, block=q.block, bits=q.bits))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", SETS)
def test_entries_of_four_bits_are_found(name, format):
    """What holds twice the values of e2m1 alone takes four bits an entry, whatever its scales."""
    n, k = 40, 320
    draw = torch.Generator().manual_seed(4)
    q = encode(torch.randn(n, k, generator=draw), format)
    odd = replace(q, scale=q.scale * (1 + torch.rand(q.scale.shape, generator=draw)))  # no fewer bytes hold them
    assert Panels(q).nbytes == 48 * (k // 2 + k // q.block[1] * (1 if format == "mxfp4" else 2))
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(5)).bfloat16()
    for stored, scale_bytes in ((q, None), (odd, 4)):
        panels, want = Panels(stored), x.float() @ stored.dequantize().T
        assert panels.kind == MXFP4 and (scale_bytes is None or panels.scales["scale"].dtype is torch.float32)
        with use_instruction_set(name):
            got, many = multiply(panels.matrices[0], x, True), torch.empty(3, n)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()
            assert torch.equal(expand_rows(panels.matrices[0], 0, n), stored.dequantize(torch.bfloat16))
            if multiply_on_tiles(panels.matrices[0], x, many):
                assert (many - want).abs().max() <= 5e-3 * want.abs().max()
    other = replace(q, data=q.data.clone())
    other.data[39, 319] = 5
    assert Panels(other).kind != MXFP4
