"""Families with attention of their own: published configs in another form than transformers', and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
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
