"""Which tensors of a checkpoint are quantized, and FP8 blocks as they are read and divided."""

from __future__ import annotations

import pytest
import torch

from inferplane.binding import DictSource
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.ops import encode
from inferplane.quant import format_of, read_fp8_block
from inferplane.types.placement import WHOLE, Shard

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


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
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [64, 128]},
        {"weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": None},
    ],
)
def test_other_methods_are_refused(settings):
    with pytest.raises(UnsupportedModelError, match=r"Quantization method .*'fp8' with weight_block_size \[128, 128\]"):
        format_of(settings, None)


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
