"""Quantizing activations, group by group."""

import pytest
import torch

from inferplane.errors import UsageError
from inferplane.ops import Quantize, dequantize_rows
from tests.unit.support.small import BF16, bound

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("format", "top", "dtype"), [("fp8", 448.0, FP8), ("int8", 127.0, torch.int8)])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (200, 128), (96, 0), (7, 3)])
def test_each_group_has_its_scale(format, top, dtype, columns, group):
    x = torch.randn(5, columns) * torch.logspace(-3, 3, 5)[:, None]
    x[2] = 0
    data, scale = bound(Quantize(format, group))(x)
    size = group or columns
    assert data.dtype is dtype and data.shape == x.shape and scale.dtype is torch.float32
    assert scale.shape == (5, -(-columns // size))
    for row in range(5):
        for g in range(scale.shape[1]):
            cut = slice(g * size, (g + 1) * size)
            amax = x[row, cut].abs().max()
            s = amax / top if amax else torch.tensor(1.0)
            torch.testing.assert_close(scale[row, g], s)
            want = (x[row, cut] / s).to(dtype) if dtype is FP8 else (x[row, cut] / s).round().to(dtype)
            assert torch.equal(data[row, cut].float(), want.float())
    back = dequantize_rows(data, scale, group)
    assert back.dtype is torch.float32 and not back[2].any()
    assert (
        (back - x).abs() <= x.abs().amax(-1, keepdim=True) * (16 / 448 if dtype is FP8 else 0.5 / 127) * 1.001
    ).all()


def test_bfloat16_is_quantized_from_its_own_values():
    x = torch.randn(3, 64).bfloat16()
    assert all(
        torch.equal(a.float(), b.float())
        for a, b in zip(bound(Quantize(), dtype=BF16)(x), bound(Quantize())(x.float()))
    )


def test_scales_of_other_groups_are_refused():
    data, scale = bound(Quantize("int8", 64))(torch.randn(2, 256))
    with pytest.raises(UsageError, match="groups of 128 columns"):
        dequantize_rows(data, scale, 128)
    with pytest.raises(UsageError, match="groups of all columns"):
        dequantize_rows(data, scale, 0)


def test_what_compare_forgives():
    data, scale = bound(Quantize("int8", 0))(torch.randn(4, 100))
    same = Quantize.compare((data, scale), (data, scale))
    assert same.error == 0
    neighbour = (data.int() + 1).clamp(-127, 127).to(torch.int8)
    assert Quantize.compare((neighbour, scale), (data, scale)).error == 0, "rounding may go the other way"
    off = data.clone()
    off[1, 3] += 2
    assert Quantize.compare((off, scale), (data, scale)).error == pytest.approx(1 / 400)
    assert Quantize.compare((data, scale * 1.01), (data, scale)).error == pytest.approx(0.01, rel=1e-2)
    assert Quantize.compare((data.float(), scale), (data, scale)).error == float("inf")
    f8, s8 = bound(Quantize("fp8", 0))(torch.randn(4, 100))
    code = f8.view(torch.uint8)  # neighbours in value are neighbours in code; 0x7e is the largest
    for steps, forgiven in ((1, True), (2, False)):
        up = torch.where(code % 128 <= 0x7E - steps, code + steps, code).view(FP8)
        assert (Quantize.compare((up, s8), (f8, s8)).error == 0) is forgiven
    assert Quantize.compare(((f8.float() * 1.5).clamp(-448, 448).to(FP8), s8), (f8, s8)).error > 0.5
