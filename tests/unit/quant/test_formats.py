"""Which tensors of a checkpoint are quantized, and FP8 blocks as they are read and divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.binding import DictSource
from inferplane.binding.load import assemble
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.parts import norm_output_quant
from inferplane.ops import Linear, encode
from inferplane.quant import READERS, format_of, read_fp8_block, read_fp8_row, read_fp8_static, read_quant_config
from inferplane.types import ActivationQuant, QTensor, Weight
from inferplane.types.placement import WHOLE, Shard

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
DYNAMIC = {**NUMBERS, "strategy": "token", "dynamic": True}


def compressed(inputs=DYNAMIC, **weights):
    group = {"targets": ["Linear"], "weights": {**NUMBERS, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def test_by_the_scales_in_the_checkpoint():
    of = format_of(FP8, {"a.weight", "a.weight_scale_inv", "b.weight"})
    assert (of("a.weight"), of("b.weight"), of("c.weight")) == ("fp8_block", "plain", "plain")
    for settings in (None, {}):
        assert format_of(settings, {"a.weight", "a.weight_scale_inv"})("a.weight") == "plain"


def test_by_the_config_alone():
    of = format_of(FP8, None)
    quantized = {
        f"model.layers.3.{name}.weight"
        for name in (
            *(
                f"self_attn.{x}"
                for x in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            ),
            *(f"mlp.{x}" for x in ("gate_proj", "experts.7.up_proj", "shared_experts.down_proj")),
        )
    }
    plain = {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.3.self_attn.q_a_layernorm.weight",
        "model.layers.61.eh_proj.weight",
    }
    assert {n for n in quantized | plain if of(n) == "fp8_block"} == quantized


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [64, 128]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"weight_block_size": [128, 128]},
        {"quant_method": ["fp8"], "weight_block_size": [128, 128]},
        compressed(num_bits=4),
        compressed(type="int"),
        compressed(strategy="group"),
        compressed(strategy="block"),
        compressed(strategy="block", block_structure=[64, 64]),
        compressed({"num_bits": 8, "type": "int"}),
        compressed({**NUMBERS, "strategy": "channel", "dynamic": False}),
        compressed({**NUMBERS, "dynamic": "local"}),
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
        {"quant_method": "compressed-tensors", "config_groups": [compressed()]},
    ],
)
def test_other_methods_are_refused(settings):
    with pytest.raises(UnsupportedModelError, match=r"Quantization method .*'fp8' with weight_block_size \[128, 128\]"):
        format_of(settings, None)


@pytest.mark.parametrize(
    ("settings", "format", "act"),
    [
        (FP8, "fp8_block", ""),
        ({**FP8, "activation_scheme": "dynamic"}, "fp8_block", "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_row", "fp8_static"),
        ({**FP8, "activation_scheme": "static"}, "fp8_block", ""),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}, "fp8_row", "fp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8_row", "fp8"),
        (compressed(), "fp8_row", "fp8"),
        (compressed(None), "fp8_row", ""),
        (compressed(strategy="channel"), "fp8_row", "fp8"),
        (compressed(strategy="block", block_structure=[128, 128]), "fp8_block", "fp8"),
        (compressed({**NUMBERS, "dynamic": False}), "fp8_row", "fp8_static"),
        (compressed(NUMBERS, strategy="channel"), "fp8_row", "fp8_static"),
        (compressed(NUMBERS, strategy="block", block_structure=[128, 128]), "fp8_block", ""),
    ],
)
def test_what_a_config_asks_for(settings, format, act):
    found = read_quant_config(settings, {"a.weight", "a.weight_scale", "a.input_scale", "b.weight"})
    assert (found.format_of("a.weight"), found.format_of("b.weight")) == (format, "plain")
    assert str(found.activation_quants.get(format, "")) == act and "*.input_scale" in found.unread
    assert read_quant_config(settings, None).format_of("model.layers.0.mlp.up_proj.weight") == format
    expert = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    assert read_quant_config(settings, None).format_of(expert) == format


def test_groups_that_differ_are_refused():
    mixed = compressed()
    mixed["config_groups"]["group_1"] = compressed(None)["config_groups"]["group_0"]
    with pytest.raises(UnsupportedModelError, match="compressed-tensors"):
        read_quant_config(mixed, None)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("form", [(), (1,), (1, 1), (300,), (300, 1)])
def test_a_scale_for_all_or_a_row(form, suffix):
    q = encode(torch.randn(300, 192), "fp8_row")
    scale = q.scale if 300 in form else q.scale[:1]
    tensors = {"w": q.data, f"w{suffix}": scale.reshape(form).bfloat16()}
    want = q.data.float() * scale.bfloat16().float()
    for axis, size in ((0, 1), (0, 3), (1, 2)):
        for rank in range(size):
            got = read_fp8_row(DictSource(tensors), "w", Shard(axis, rank, size))
            assert torch.equal(got.dequantize(), want.chunk(size, axis)[rank])
            assert got.block == (1, got.shape[1]) and got.scale.dtype is torch.float32


def test_scales_of_another_shape_are_refused():
    q = encode(torch.randn(300, 192), "fp8_row")
    good = {"w": q.data, "w_scale": q.scale}
    for bad in (
        {"w_scale": q.scale[:2]},
        {"w_scale": torch.ones(3, 2)},
        {"w_scale": q.scale.int()},
        {"w": q.data.float()},
    ):
        with pytest.raises(CheckpointError, match=r"w \(300, 192\).* is no FP8 weight with a scale per row"):
            read_fp8_row(DictSource({**good, **bad}), "w", WHOLE)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
@pytest.mark.parametrize("form", [(), (1,), (1, 1)])
def test_a_static_scale_of_activations(form, name):
    q = encode(torch.randn(300, 192), "fp8_row")
    tensors = {"a.weight": q.data, "a.weight_scale": q.scale, f"a.{name}": torch.full(form, 0.25).bfloat16()}
    for axis, rank in ((0, 1), (1, 0)):
        got = read_fp8_static(DictSource(tensors), "a.weight", Shard(axis, rank, 2))
        assert torch.equal(got.dequantize(), q.dequantize().chunk(2, axis)[rank])
        assert got.act_scale.tolist() == [0.25] and got.act_scale.dtype is torch.float32
        assert got.to("cpu").act_scale.tolist() == [0.25] and got.refine(1).act_scale.tolist() == [0.25]
    other = replace(got, act_scale=torch.tensor([0.5]))
    assert QTensor.cat([other, got, other]).act_scale.tolist() == [0.5]
    assert QTensor.cat([got, replace(got, act_scale=None)]).act_scale is None


@pytest.mark.parametrize(
    ("scale", "what"),
    [
        (None, r"^a\.weight lacks a\.input_scale: the config says that activation scales are static"),
        (torch.ones(3), r"^a\.input_scale is \(3,\) torch\.float32, not one positive floating-point number"),
        (torch.ones((), dtype=torch.int32), r"is \(\) torch\.int32, not one positive"),
        (torch.tensor(0.0), "is 0, not one positive"),
        (torch.tensor(-0.5), r"is -0\.5, not one positive"),
        (torch.tensor(float("nan")), "is nan, not one positive"),
        (torch.tensor([float("inf")]), "is inf, not one positive"),
    ],
    ids=["missing", "three", "integer", "zero", "negative", "nan", "infinite"],
)
def test_bad_static_scales_are_refused(scale, what):
    q = encode(torch.randn(30, 64), "fp8_row")
    tensors = {"a.weight": q.data, "a.weight_scale": q.scale} | ({} if scale is None else {"a.input_scale": scale})
    with pytest.raises(CheckpointError, match=what) as raised:
        read_fp8_static(DictSource(tensors), "a.weight", WHOLE)
    assert "dynamic activation scales" in str(raised.value)


def test_weights_say_whether_scales_are_static():
    """With dynamic scales a norm may quantize; with static ones only the linear can, whose weight has the scale."""
    quants = ActivationQuant("fp8"), ActivationQuant("fp8", static=True)
    dynamic, static = (Weight(("a",), (8, 8), format="fp8_row", activation_quant=quant) for quant in quants)
    assert (
        Linear(static).activation_quants() == Linear(dynamic).activation_quants() == {"fp8"}
        and static.key() != dynamic.key()
    )
    assert norm_output_quant(dynamic) == quants[0] and norm_output_quant(static) is None


def test_a_stack_of_experts_has_one_static_scale():
    q = encode(torch.randn(2, 32, 64), "fp8_row")
    names = [f"{e}.{part}.weight" for e in range(2) for part in ("up", "down")]
    weight = Weight(tuple(names), (2, 32, 64), format="fp8_row", activation_quant=ActivationQuant("fp8", static=True))
    tensors = {}
    for i, name in enumerate(names):
        half = slice(16 * (i % 2), 16 * (i % 2) + 16)
        tensors |= {name: q.data[i // 2, half], f"{name}_scale": q.scale[i // 2, half]}
        tensors[name.replace("weight", "input_scale")] = torch.tensor([0.1, 0.4, 0.2, 0.3][i])
    got = assemble(weight, DictSource(tensors), torch.float32, READERS)
    assert torch.equal(got.dequantize(), q.dequantize())
    torch.testing.assert_close(got.act_scale, torch.tensor([0.4]))


@pytest.mark.parametrize("shape", [(300, 384), (64, 100), (129, 128), (1, 1)])
def test_blocks(shape):
    q = encode(torch.randn(shape), "fp8_block")
    source = DictSource({"w": q.data, "w_scale_inv": q.scale})
    got = read_fp8_block(source, "w", WHOLE)
    assert torch.equal(got.data.view(torch.uint8), q.data.view(torch.uint8)) and torch.equal(got.scale, q.scale)
    assert got.block == (128, 128)
    source.tensors["w_scale_inv"] = q.scale.bfloat16()  # other exporters round them
    assert torch.equal(read_fp8_block(source, "w", WHOLE).scale, q.scale.bfloat16().float())


@pytest.mark.parametrize(("axis", "size"), [(0, 2), (0, 3), (0, 4), (1, 3)])
def test_slices_of_blocks(axis, size):
    q = encode(torch.randn(300, 384), "fp8_block")
    source = DictSource({"w": q.data, "w_scale_inv": q.scale})
    for rank in range(size):
        got = read_fp8_block(source, "w", Shard(axis, rank, size))
        assert torch.equal(got.dequantize(), q.dequantize().chunk(size, axis)[rank])


def test_what_does_not_fit_is_refused():
    q = encode(torch.randn(200, 300), "fp8_block")
    good = {"w": q.data, "w_scale_inv": q.scale}
    for bad in (
        {"w_scale_inv": q.scale.T.contiguous()},
        {"w_scale_inv": q.scale.flatten()},
        {"w_scale_inv": q.scale.int()},
        {"w": q.data.float()},
        {"w": q.data.view(torch.uint8)},
    ):
        with pytest.raises(CheckpointError, match=r"w \(200, 300\).*w_scale_inv.* is no FP8 weight in blocks"):
            read_fp8_block(DictSource({**good, **bad}), "w", WHOLE)
    with pytest.raises(CheckpointError, match="w_scale_inv None"):
        read_fp8_block(DictSource({"w": q.data}), "w", WHOLE)
