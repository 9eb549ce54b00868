"""Families with attention of their own: published configs in another form than transformers', and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Step3p7TextConfig

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.ops import Rope, SiluMul
from tests.unit.models.families.test_recurrent import config

MIMO: dict[str, Any] = {
    **{"architectures": ["MiMoV2FlashForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16},
    **{"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1]},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 24, "swa_v_head_dim": 16},
    **{"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5},
    **{"sliding_window": 128, "sliding_window_size": 128, "attention_value_scale": 0.707, "scoring_func": "sigmoid"},
    **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "routed_scaling_factor": None},
    **{"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
}
"""As XiaomiMiMo/MiMo-V2-Flash publishes it, in other sizes."""


def test_mimo_as_published():
    model = build(Build(Config(MIMO), positions=16))
    assert [layer.attn.few.kv.window for layer in model.layers] == [None, 129, 129, 129, 129, None, 129]
    assert [layer.attn.heads for layer in model.layers[:2]] == [(4, 1), (4, 2)]
    assert [layer.attn.few.sinks is None for layer in model.layers[:2]] == [True, False]
    assert [layer.mlp.has_experts for layer in model.layers] == [False] + [True] * 6
    far, near = (layer.attn.enter.rope for layer in model.layers[:2])
    assert far.size == near.size == 8
    angles = [rope.rope.table.make()[1, 1].asin() for rope in (far, near)]
    for angle, base in zip(angles, (5e6, 1e4), strict=True):
        assert angle[1].item() == pytest.approx(base**-0.25, rel=1e-5)
    without = {key: value for key, value in MIMO.items() if key not in ("hybrid_layer_pattern", "moe_layer_freq")}
    other = build(Build(Config(without)))
    assert [layer.attn.few.kv for layer in other.layers] == [layer.attn.few.kv for layer in model.layers]


STEP: dict[str, Any] = {
    **{"model_type": "step3p5", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 16, "moe_num_experts": 8, "moe_top_k": 2},
    **{"moe_intermediate_size": 16, "share_expert_dims": 24, "moe_layers_enum": "2,3", "sliding_window": 13},
    **{"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "num_nextn_predict_layers": 1},
    **{"attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6}},
    **{"rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5]},
    **{"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}},
    **{"swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0], "swiglu_limits_shared": [0.0, 16.0, None, 16.0, 0.0]},
    **{"moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "use_head_wise_attn_gate": True},
}
"""As stepfun-ai/Step-3.7-Flash publishes its text part, in other sizes."""
STEP["rope_scaling"]["original_max_position_embeddings"] = 64


def read_step(**changes: Any) -> Config:
    text = {key: value for key, value in {**STEP, **changes}.items() if value is not ...}
    return Config({"architectures": ["Step3p7ForConditionalGeneration"], "text_config": text})


def test_step_as_published():
    """As transformers reads the same entries: a value a layer, then those of layers that predict further tokens."""
    theirs = Step3p7TextConfig(**{key: value for key, value in copy.deepcopy(STEP).items() if key != "model_type"})
    own = Build(read_step(), positions=16)
    model = build(own)
    layers = list(model.layers)
    assert [layer.attn.few.heads for layer in layers] == [4, 6, 6, 6]
    assert [layer.attn.few.kv.window for layer in layers] == [None, 13, 13, 13]
    assert [layer.mlp.has_experts for layer in layers] == [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert theirs.layer_types == ["full_attention", *["sliding_attention"] * 3]
    assert layers[0].mlp.act.__class__ is SiluMul and layers[1].mlp.act.limit == 16.0
    assert [layer.mlp.experts.limit for layer in layers[2:]] == [None, 7.0]
    assert layers[2].mlp.shared.act.__class__ is SiluMul and layers[3].mlp.shared.act.limit == 16.0
    assert {layer.mlp.route.factor for layer in layers[2:]} == {3.0} and "model.layers.4.*" in own.ignored
    far, near = (layer.attn.enter.rope for layer in layers[:2])
    assert far.size == 8 and isinstance(near, Rope)
    kinds = {kind: theirs.rope_parameters[kind]["rope_type"] for kind in theirs.rope_parameters}
    assert kinds == {"full_attention": "llama3", "sliding_attention": "default"}
    assert near.table.make()[1, 1, 1].asin().item() == pytest.approx(1e4 ** (-1 / 8), rel=1e-5)
    plain = build(Build(read_step(rope_scaling=...), positions=16)).layers[0].attn.enter.rope.rope
    assert plain.table.make()[1, 1, 1].asin().item() == pytest.approx(5e6 ** (-1 / 4), rel=1e-5)
    assert not torch.equal(plain.table.make(), far.rope.table.make())


def test_what_step_lacks_is_refused():
    for changes in ({"moe_router_activation": "softmax"}, {"use_head_wise_attn_gate": False}):
        with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
            build(Build(read_step(**changes)))
    with pytest.raises(CheckpointError, match=r"swiglu_limits is .*, not a list of 4 numbers"):
        build(Build(read_step(swiglu_limits=[0.0])))
    with pytest.raises(CheckpointError, match=r"share_expert_dim is 0, not a positive integer"):
        build(Build(read_step(share_expert_dims=0)))
    with pytest.raises(CheckpointError, match="moe_layers_enum is 3, not a list"):
        build(Build(read_step(moe_layers_enum=3)))
    for changes in ({"rope_theta": []}, {"partial_rotary_factors": [0.5]}):
        with pytest.raises(CheckpointError, match=next(iter(changes)).removesuffix("s")):
            build(Build(read_step(**changes)))


def test_longcat_has_two_halves_a_layer():
    model = build(Build(config("longcat_flash")))
    assert [layer.experts is None for layer in model.layers] == [False, True] * 2
    attn, experts = model.layers[0].attn, model.layers[0].experts
    assert attn.absorbed.scale == attn.expanded.scale == pytest.approx((64 / 40 / 40) ** 0.5)
    assert attn.enter.kv_a_norm.factor == pytest.approx((64 / 48) ** 0.5)
    assert experts.router.weight.shape[0] == 9 and experts.first_identity == experts.experts.gate_up.shape[0] == 6
    assert build(Build(config("longcat_flash", zero_expert_num=0))).layers[0].experts.first_identity is None


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("mimo_v2_flash", {"swa_head_dim": 12}, "swa_head_dim = 12"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts = 1"),
        ("mimo_v2_flash", {"layer_types": ..., "hybrid_layer_pattern": [0, 2, 1, 1]}, "layer_types = '2'"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type = 'copy'"),
        ("longcat_flash", {"router_bias": True}, "router_bias = True"),
        ("longcat_flash", {"mla_scale_q_lora": False}, "mla_scale_q_lora = False"),
    ],
)
def test_what_is_not_implemented_is_refused(family, changes, match):
    with pytest.raises(UnsupportedModelError, match=match):
        build(Build(config(family, **changes)))


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("mimo_v2_flash", {"layer_types": ..., "hybrid_layer_pattern": [0, 1]}, "layer_types is not a list of 4 names"),
        ("mimo_v2_flash", {"v_head_dim": 0}, "v_head_dim is 0, not a positive integer"),
        ("longcat_flash", {"num_layers": ...}, "lacks 'num_layers'"),
        ("longcat_flash", {"moe_topk": 10}, r"exceeds n_routed_experts \+ zero_expert_num = 9"),
    ],
)
def test_what_contradicts_itself_is_refused(family, changes, match):
    with pytest.raises(CheckpointError, match=match):
        build(Build(config(family, **changes)))
