"""Numerics of calibration, by hand arithmetic and on planted cases."""

from __future__ import annotations

import pytest
import torch

from inferplane.calibrate.methods import smoothing
from inferplane.calibrate.methods.awq import awq
from inferplane.calibrate.methods.gptq import Hessian, gptq
from inferplane.calibrate.methods.quantease import quantease
from inferplane.calibrate.methods.rounding import Grid, fake_quantize, round_to_nearest, search_clip
from inferplane.calibrate.methods.smoothing import group_channels, pss, search_smooth, smoothquant
from inferplane.ops import encode
from inferplane.ops.formats import find_nvfp4_factor
from inferplane.types import ActivationQuant

INT8 = ActivationQuant("int8")
FORMATS = ("int8_row", "int8_group", "int4_row", "int4_group", "int4_group64", "int4_group32", "fp8_row", "fp8_block")
FORMATS += ("mxfp4", "nvfp4")
LARGEST = {"int8": 127, "int4": 8, "mxfp": 12, "nvfp": 12}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows, columns, seed=0):
    """Inputs whose columns depend on few factors."""
    return draw(rows, 8, seed=seed) @ draw(8, columns, seed=seed + 1) + 0.1 * draw(rows, columns, seed=seed + 2)


def hessian_of(x):
    found = Hessian(x.shape[1])
    for part in x.split(50):
        found.add(part)
    return found


def loss(x, weight, q):
    return ((x @ q.dequantize().T) - x @ weight.T).square().mean().item()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(48, 256), (130, 200)])
def test_gptq_loses_less_than_rounding(format, shape):
    """On inputs that depend on each other, in groups that are whole and that are not."""
    x, weight = correlated(300, shape[1]), draw(*shape, seed=9)
    rounded = gptq(weight, hessian_of(x), format)
    q = rounded.weight
    assert rounded.damping == 0.01
    assert q.shape == shape and q.block == Grid(format, shape).block
    assert loss(x, weight, q) < (0.7 if format.startswith("fp8") else 0.5) * loss(
        x, weight, round_to_nearest(weight, format)
    )
    assert q.data.float().abs().max() <= LARGEST.get(format[:4], 448)


def test_two_columns_by_hand():
    """The first column's error is made up for by the second, by H12 / H22 of it."""
    x = torch.tensor([[1.0, 1.0], [1.0, 0.5]]).repeat(100, 1)
    weight = torch.tensor([[0.33, 1.0]])
    hessian = hessian_of(x)
    q = gptq(weight, hessian, "int4_row").weight
    # Scale by search; with it, by hand: column 0 has the most power and is rounded first.
    scale = q.scale[0, 0].item()
    first = round(0.33 / scale)
    damped = hessian.total.double() + torch.eye(2) * 0.01 * hessian.total.diagonal().mean()
    error = 0.33 - first * scale
    second = 1.0 + error * (damped[0, 1] / damped[1, 1]).item()
    assert q.data.tolist() == [[first, max(-8, min(7, round(second / scale)))]]


def test_gptq_without_dependence_is_rounding():
    weight = draw(20, 128)
    x = torch.eye(128)
    assert torch.equal(
        gptq(weight, hessian_of(x), "int4_group32").weight.data, search_clip(weight, "int4_group32").data
    )


def test_columns_without_inputs_are_rounded_to_nearest():
    x, weight = correlated(200, 128), draw(16, 128)
    x[:, 7] = 0
    q = gptq(weight, hessian_of(x), "int8_row").weight
    near = (weight[:, 7] / q.scale[:, 0]).round()
    assert torch.equal(q.data[:, 7].float(), near)
    nothing = gptq(weight, Hessian(128), "int8_row")
    assert nothing.damping is None and loss(draw(10, 128), weight, nothing.weight) < 1e-2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(48, 256), (130, 200)])
def test_quantease_loses_less_than_gptq(format, shape):
    """By at least 2 % of the error, on the inputs that it reads."""
    x, weight = correlated(300, shape[1]), draw(*shape, seed=9)
    before, q = gptq(weight, hessian_of(x), format).weight, quantease(weight, hessian_of(x), format)
    assert loss(x, weight, q) < 0.98 * loss(x, weight, before)
    assert q.shape == shape and q.block == before.block and q.data.dtype == before.data.dtype
    assert q.data.float().abs().max() <= LARGEST.get(format[:4], 448)
    if format.startswith(("fp8", "mxfp4", "nvfp4")):
        assert torch.equal(q.scale, before.scale)
    else:
        half = q.scale.half().float()
        assert torch.equal(half, q.scale) and not torch.equal(q.scale, before.scale)


def test_quantease_leaves_the_best_entries():
    """Of all pairs of entries, at the scale that it chose, none has a smaller error."""
    x, weight = draw(200, 2) @ torch.tensor([[1.0, 0.6], [0.0, 1.0]]), torch.tensor([[0.33, 1.0], [-0.8, 0.21]])
    hessian = hessian_of(x)
    q = quantease(weight, hessian, "int4_row")
    damped = hessian.total + torch.eye(2) * 0.03 * hessian.total.diagonal().mean()
    entries = torch.cartesian_prod(torch.arange(-8.0, 8), torch.arange(-8.0, 8))
    for row in range(2):
        errors = entries * q.scale[row] - weight[row]
        every = ((errors @ damped) * errors).sum(1)
        own = q.data[row].float() * q.scale[row] - weight[row]
        assert own @ damped @ own == pytest.approx(every.min().item(), rel=1e-4)


def test_quantease_without_inputs_is_gptq():
    weight = draw(16, 128)
    before, q = gptq(weight, Hessian(128), "int4_group32").weight, quantease(weight, Hessian(128), "int4_group32")
    assert torch.equal(q.data, before.data) and torch.equal(q.scale, before.scale)
    x = correlated(200, 128)
    x[:, 7] = 0
    q = quantease(weight, hessian_of(x), "int8_row")
    assert torch.equal(q.data[:, 7].float(), (weight[:, 7] / q.scale[:, 0]).round())


@pytest.mark.parametrize("format", FORMATS)
def test_odd_matrices(format):
    """Zeros, constants, one outlier, tiny and large numbers."""
    weight = draw(64, 160)
    weight[0], weight[1], weight[2, 3], weight[3], weight[4] = 0, 0.5, 100.0, draw(160) * 1e-6, draw(160) * 1e4
    for q in (search_clip(weight, format), gptq(weight, hessian_of(correlated(90, 160)), format).weight):
        value = q.dequantize()
        assert value.isfinite().all()
        if format != "fp8_block":
            assert not value[0].any()
            # NVFP4's scales share a factor with those of numbers 20,000 times as large.
            assert (value[1] - 0.5).abs().max() < (0.13 if format == "nvfp4" else 0.04)
        if format in ("mxfp4", "nvfp4"):
            assert set(q.data.abs().unique().tolist()) <= {0, 1, 2, 3, 4, 6, 8, 12}
            assert_storable(q, format)
    wrong, nearest = (
        Grid(format, (64, 160)).tile((q.dequantize() - weight).square()).sum((1, 3))
        for q in (search_clip(weight, format), round_to_nearest(weight, format))
    )
    assert (wrong <= nearest * (1 + 1e-5) + 1e-12).all()
    if "int4" in format:
        of_seven = (encode(weight, format).dequantize() - weight).square().sum()  # steps in the largest magnitude
        assert wrong.sum() < 0.95 * nearest.sum() < 0.85 * of_seven


@pytest.mark.parametrize("format", FORMATS)
def test_quantease_of_odd_matrices(format):
    """As GPTQ's, and no row loses more."""
    weight, hessian = draw(64, 160), hessian_of(correlated(90, 160))
    weight[0], weight[1], weight[2, 3], weight[3], weight[4] = 0, 0.5, 100.0, draw(160) * 1e-6, draw(160) * 1e4
    before, q = gptq(weight, hessian, format).weight, quantease(weight, hessian, format)
    assert q.dequantize().isfinite().all() and (q.scale != 0).all()
    assert format == "fp8_block" or not q.dequantize()[0].any()
    damped = hessian.total + torch.eye(160) * 0.03 * hessian.total.diagonal().mean()
    wrong, bound = ((e @ damped * e).sum(1) for e in (q.dequantize() - weight, before.dequantize() - weight))
    assert (wrong <= bound * (1 + 1e-4)).all()
    if format in ("mxfp4", "nvfp4"):
        assert_storable(q, format)


def assert_storable(q, format):
    """Scales of MXFP4 are powers of two, those of NVFP4 numbers of e4m3 times one power of two."""
    if format == "mxfp4":
        assert (torch.frexp(q.scale).mantissa == 0.5).all()
        return
    narrow = q.scale * 2 / find_nvfp4_factor(q.scale.max() * 12)
    assert torch.equal(narrow.to(torch.float8_e4m3fn).float(), narrow)


def test_clipping_heeds_the_importance_of_columns():
    weight = draw(32, 128)
    weight[:, 0] = 12.0
    little = torch.ones(128)
    little[0] = 1e-6
    much = torch.ones(128)
    much[0] = 1e6
    errors = [(search_clip(weight, "int4_row", by).dequantize() - weight)[:, 0].abs().mean() for by in (little, much)]
    assert errors[0] > 10 * errors[1]


def outliers(seed=0):
    """Inputs with three kinds of channels; some with large inputs have a large weight too."""
    x, weight = draw(256, 96, seed=seed), draw(64, 96, seed=seed + 1)
    size = torch.ones(96)
    size[::16], size[1::16] = 50.0, 7.0
    weight[3, ::16] *= 20
    return x * size, weight


def trial_of(x, weight):
    return smoothing.Trial(x, weight, "int8_row", INT8)


def smooth_loss(x, weight, scale):
    return trial_of(x, weight).loss(scale)


def test_piecewise_search_beats_one_exponent_beats_none():
    for seed in range(3):
        x, weight = outliers(10 * seed)
        largest = x.abs().amax(0)
        one = search_smooth(trial_of(x, weight), largest, weight.abs().amax(0))
        piecewise = pss(trial_of(x, weight), largest, weight.abs().amax(0))
        losses = [smooth_loss(x, weight, scale) for scale in (piecewise, one, torch.ones(96))]
        assert losses[0] < 0.99 * losses[1] and losses[1] < 0.5 * losses[2]


def test_smoothing_changes_no_product():
    x, weight = outliers()
    for scale in (
        pss(trial_of(x, weight), x.abs().amax(0), weight.abs().amax(0)),
        smoothquant(x.abs().amax(0), weight.abs().amax(0)),
    ):
        assert ((x / scale) @ (weight * scale).T - x @ weight.T).abs().max() <= 1e-5 * (x @ weight.T).abs().max()
    still = torch.zeros(4)
    assert torch.equal(smoothquant(still, torch.ones(4)), torch.ones(4))


def test_scales_of_several_searches_do_not_add_up():
    """Each channel's scale is one of the candidates, as it would not be if a search went on from the one before."""
    x, weight = outliers()
    scale = pss(trial_of(x, weight), x.abs().amax(0), weight.abs().amax(0), pieces=4)
    candidates = torch.stack(list(smoothing._list_candidates(x.abs().amax(0), weight.abs().amax(0))))
    assert ((scale == candidates) | (scale == 1)).any(0).all() and len(scale.unique()) > 3


def test_candidates_reach_both_ends():
    found = [c for c in smoothing._list_candidates(torch.full((2,), 4.0), torch.ones(2))]
    assert found[0][0] == pytest.approx(4**0.2) and any(c[0].item() == pytest.approx(4**0.8) for c in found)
    assert [c[0].item() for c in found[-9:]] == [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]


def test_groups_of_channels():
    values = torch.tensor([1.0, 50.0, 1.1, 7.0, 0.9, 51.0, 6.5])
    for seed in range(5):
        masks = group_channels(values, 3, seed)
        assert [mask.nonzero().flatten().tolist() for mask in masks] == [[0, 2, 4], [3, 6], [1, 5]]
    assert len(group_channels(torch.ones(9), 3)) == 1
    assert sum(mask.sum() for mask in group_channels(draw(100).abs(), 6)) == 100


def test_awq_protects_channels_with_large_inputs():
    x, weight = outliers()
    trial = smoothing.Trial(x, weight, "int4_group32", None)
    scale = awq(trial, x.abs().mean(0))
    assert scale[0] > 2 * scale[2] and scale.min() > 0
    assert trial.loss(scale) < 0.7 * trial.loss(torch.ones(96))


def test_activations_are_quantized_as_kernels_do():
    x = draw(5, 256)
    assert torch.equal(fake_quantize(x, None), x)
    rounded = fake_quantize(x, INT8)
    scale = x.abs().amax(1, keepdim=True) / 127
    assert torch.allclose(rounded, (x / scale).round() * scale)


def test_hessian_follows_its_inputs():
    x, scale = correlated(100, 32), draw(32).abs() + 0.5
    hessian = hessian_of(x)
    hessian.divide(scale)
    assert torch.allclose(hessian.total, hessian_of(x / scale).total, rtol=1e-4, atol=1e-3)
    hessian.include(hessian_of(x), 0.5)
    assert hessian.rows == 150


def test_columns_that_are_one_channel_share_its_scale():
    """As those of query heads that read the values of one head."""
    x, weight = outliers()
    x, weight = torch.cat((x, x.flip(0)), 1), torch.cat((weight, weight.flip(0)), 1)
    trial = smoothing.Trial(x, weight, "int8_row", INT8, lambda scale: scale.repeat(2))
    act_max, weight_max = x.abs().amax(0)[:96], weight.abs().amax(0)[:96]
    for scale in (search_smooth(trial, act_max, weight_max), pss(trial, act_max, weight_max)):
        assert scale.shape == (96,) and trial.loss(scale) < 0.5 * trial.loss(torch.ones(96))


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_one_number_that_is_none_leaves_other_groups_of_nvfp4_alone(lost):
    weight = draw(4, 64)
    expected = search_clip(weight, "nvfp4").dequantize()
    weight[1, 3] = lost
    found = search_clip(weight, "nvfp4").dequantize()
    assert found[1, :16].isnan().all() and torch.equal(found[1, 16:], expected[1, 16:])
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
