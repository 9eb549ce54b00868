"""Weights with a scale per 16 or 32 columns: every byte beside every scale, and what their configs say."""

from __future__ import annotations

import warnings

import pytest
import torch

from inferplane.binding import DictSource
from inferplane.errors import CheckpointError, InferplaneWarning, UnsupportedModelError
from inferplane.ops import encode
from inferplane.quant import read_quant_config
from inferplane.types import ActivationQuant
from inferplane.types.placement import WHOLE, Shard

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
FACTOR = 0.0123
BYTES = range(256)


def modelopt(algo, **more):
    return {"quant_method": "modelopt", "quant_algo": algo, **more}


def compressed(format, bits, columns, strategy, inputs=None):
    weights = {"num_bits": bits, "type": "float", "group_size": columns, "strategy": strategy, "symmetric": True}
    groups = {"group_0": {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


NVFP4 = "nvfp4-pack-quantized", 4, 16, "tensor_group"
MXFP4 = "mxfp4-pack-quantized", 4, 32, "group"
MXFP8 = "mxfp8-quantized", 8, 32, "group"
SETTINGS = {
    ("nvfp4", "modelopt"): modelopt("W4A16_NVFP4", group_size=16),
    ("mxfp4", "modelopt"): modelopt("MXFP4"),
    ("mxfp8", "modelopt"): modelopt("MXFP8"),
    ("nvfp4", "compressed"): compressed(*NVFP4),
    ("mxfp4", "compressed"): compressed(*MXFP4),
    ("mxfp8", "compressed"): compressed(*MXFP8),
}


def e2m1(bits):
    sign, exponent, mantissa = (-1) ** (bits >> 3), bits >> 1 & 3, bits & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e4m3(bits):
    sign, exponent, mantissa = (-1) ** (bits >> 7), bits >> 3 & 15, bits & 7
    if bits & 127 == 127:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e8m0(bits):
    return float("nan") if bits == 255 else 2.0 ** (bits - 127)


def stored(format, form):
    """A row for each scale, in which every byte occurs; the tensors, and the values that they stand for."""
    data = torch.tensor([list(BYTES)] * 256, dtype=torch.uint8)
    entries = [e4m3(b) for b in BYTES] if format == "mxfp8" else [e2m1(n) for b in BYTES for n in (b & 15, b >> 4)]
    columns = 16 if format == "nvfp4" else 32
    scale = torch.tensor([[b] * (len(entries) // columns) for b in BYTES], dtype=torch.uint8)
    numbers = torch.tensor([e4m3(b) if format == "nvfp4" else e8m0(b) for b in BYTES], dtype=torch.float32)
    packed = form == "compressed" and format != "mxfp8"
    tensors = {f"{MODULE}.weight{'_packed' if packed else ''}": data, f"{MODULE}.weight_scale": scale}
    if format == "mxfp8":
        tensors[NAME] = data.view(torch.float8_e4m3fn)
    if format == "nvfp4":
        tensors[f"{MODULE}.weight_scale"] = scale.view(torch.float8_e4m3fn)
        factor = torch.tensor(FACTOR)
        tensors[f"{MODULE}.weight_{'global_scale' if packed else 'scale_2'}"] = factor.reshape(1) if packed else factor
        numbers = numbers / factor if packed else numbers * factor
    return tensors, numbers[:, None] * torch.tensor(entries)[None]


@pytest.mark.filterwarnings("ignore:.*activations are quantized")
@pytest.mark.parametrize(("format", "form"), SETTINGS)
def test_every_byte_beside_every_scale(format, form):
    tensors, want = stored(format, form)
    formats = read_quant_config(SETTINGS[format, form], tensors)
    assert formats.format_of(NAME) == format and formats.format_of("lm_head.weight") == "plain"
    source = formats.view(DictSource(tensors))
    assert source.shape(NAME) == tuple(want.shape) and NAME in source.names()
    q = formats.readers[format](source, NAME, WHOLE)
    assert torch.equal(q.dequantize().nan_to_num(3e38), want.nan_to_num(3e38)), "value by value"
    for axis in (0, 1):
        parts = [formats.readers[format](source, NAME, Shard(axis, rank, 2)).dequantize() for rank in range(2)]
        assert torch.equal(torch.cat(parts, axis).nan_to_num(3e38), want.nan_to_num(3e38))


def test_scales_in_a_dtype_of_their_own():
    """Some tools write e8m0 as such, not as bytes."""
    dtype = getattr(torch, "float8_e8m0fnu", None)
    if dtype is None:
        pytest.skip("this torch has no float8_e8m0fnu")
    tensors, want = stored("mxfp8", "compressed")
    tensors[f"{MODULE}.weight_scale"] = tensors[f"{MODULE}.weight_scale"].view(dtype)
    formats = read_quant_config(SETTINGS["mxfp8", "compressed"], tensors)
    q = formats.readers["mxfp8"](formats.view(DictSource(tensors)), NAME, WHOLE)
    assert torch.equal(q.dequantize().nan_to_num(3e38), want.nan_to_num(3e38))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({f"{MODULE}.weight_scale": t[f"{MODULE}.weight_scale"][:, :-1]}),
        lambda t: t.update({f"{MODULE}.weight_scale": t[f"{MODULE}.weight_scale"].float()}),
        lambda t: t.update({NAME: t[NAME][:, :-9]}),
        lambda t: t.update({NAME: t[NAME].int()}),
    ],
)
def test_what_does_not_fit_is_refused(change):
    tensors, _ = stored("nvfp4", "modelopt")
    change(tensors)
    formats = read_quant_config(SETTINGS["nvfp4", "modelopt"], tensors)
    with pytest.raises(CheckpointError, match="is no weight of format nvfp4"):
        formats.view(DictSource(tensors)).shape(NAME)


@pytest.mark.parametrize("factor", [None, torch.ones(3)])
def test_the_factor_of_all_scales_is_one_number(factor):
    tensors, _ = stored("nvfp4", "modelopt")
    tensors = {name: t for name, t in tensors.items() if not name.endswith("scale_2")}
    if factor is not None:
        tensors[f"{MODULE}.weight_scale_2"] = factor
    formats = read_quant_config(SETTINGS["nvfp4", "modelopt"], tensors)
    with pytest.raises(CheckpointError, match="needs one number"):
        formats.readers["nvfp4"](formats.view(DictSource(tensors)), NAME, WHOLE)


def test_a_rank_does_not_split_a_group():
    tensors, _ = stored("nvfp4", "modelopt")
    formats = read_quant_config(SETTINGS["nvfp4", "modelopt"], tensors)
    with pytest.raises(CheckpointError, match="splits a group of 16 columns"):
        formats.readers["nvfp4"](formats.view(DictSource(tensors)), NAME, Shard(1, 1, 64))


# ------------------------------------------------------------------ what configs say

INPUTS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": "local"}
MXFP4_INPUTS = {**INPUTS, "group_size": 32, "strategy": "group", "dynamic": True}


@pytest.mark.parametrize(
    ("settings", "format"),
    [
        (modelopt("NVFP4", group_size=16, config_groups={"group_0": {"weights": {"num_bits": 4}}}), "nvfp4"),
        (modelopt("MXFP8"), "mxfp8"),
        (compressed(*NVFP4, inputs=INPUTS), "nvfp4"),
        (compressed(*MXFP4, inputs={**MXFP4_INPUTS, "dynamic": False}), "mxfp4"),
        (compressed(*MXFP4, inputs={**MXFP4_INPUTS, "num_bits": 8}), "mxfp4"),
    ],
)
def test_activations_that_stay_as_they_are_are_reported(settings, format):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        formats = read_quant_config(settings, None)
    assert [w.category for w in found] == [InferplaneWarning]
    assert f"its {format} weights. That is not applied" in str(found[0].message)
    assert formats.format_of(NAME) == format and formats.activation_quants == {}


@pytest.mark.parametrize("settings", [modelopt("MXFP4"), compressed(*MXFP4, inputs=MXFP4_INPUTS)])
@pytest.mark.parametrize("names", [None, {f"{NAME.removesuffix('.weight')}.weight_packed", "b.weight"}])
def test_activations_in_mxfp4_are_quantized_as_the_config_says(settings, names):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_quant_config(settings, names)
    assert found.format_of(NAME) == "mxfp4" and found.format_of("b.weight") == "plain"
    assert found.activation_quants == {"mxfp4": ActivationQuant("mxfp4", 32)}


@pytest.mark.parametrize("key", ["exclude_modules", "ignore"])
def test_excluded_modules_stay_plain(key):
    patterns = ["lm_head", "model.layers.0*", "re:.*self_attn.*", "model.layers.2.mlp"]
    format_of = read_quant_config(modelopt("W4A16_NVFP4", **{key: patterns}), None).format_of
    for module, format in {
        "0.mlp.down_proj": "plain",
        "1.mlp.down_proj": "nvfp4",
        "1.self_attn.q_proj": "plain",
        "2.mlp.down_proj": "plain",
        "21.mlp.down_proj": "nvfp4",
    }.items():
        assert format_of(f"model.layers.{module}.weight") == format, module


@pytest.mark.parametrize(
    "settings",
    [
        modelopt("NVFP4", group_size=32),
        modelopt("NVFP4_AWQ"),
        modelopt(["NVFP4"]),
        compressed("nvfp4-pack-quantized", 4, 32, "tensor_group"),
        compressed("float-quantized", 8, 32, "group"),
        compressed(["nvfp4-pack-quantized"], 4, 16, "tensor_group"),
        compressed(*NVFP4, inputs="all"),
    ],
)
def test_other_forms_are_refused(settings):
    with pytest.raises(UnsupportedModelError, match="not implemented"):
        read_quant_config(settings, None)


# ------------------------------------------------------------------ quantizing


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_quantizing_rounds_to_the_nearest_value(format):
    w = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(1))
    w[1, 2, 32:64] = 0
    q = encode(w, format)
    got = q.dequantize()
    assert (got[1, 2, 32:64] == 0).all()
    entries = (w / q.expand_scale()).abs()
    if format == "mxfp8":
        assert (torch.frexp(q.scale)[0] == 0.5).all() and entries.max() > 256
        step, limit = torch.maximum(entries * 2.0**-4, torch.tensor(2.0**-10)), 448
    else:
        assert set(q.data.abs().unique().tolist()) == {0, 1, 2, 3, 4, 6, 8, 12}
        factor = 2.0 ** (w.abs().amax((-2, -1), keepdim=True) / (6 * 448)).log2().ceil()
        e4m3s = 2 * q.scale / factor
        assert torch.equal(e4m3s.to(torch.float8_e4m3fn).float(), e4m3s) and e4m3s.max() > 200
        step, limit = torch.where(entries < 4, 0.5, torch.where(entries < 8, 1.0, 2.0)), 12
    step = torch.maximum(step, entries - limit)
    assert ((got - w).abs() <= step * q.expand_scale() * 1.001).all()
