"""Families with recurrent layers: what their constructors refuse, ignore and read from their own entries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.models.reading.normalize import SPELLINGS
from inferplane.ops import MLP, BlockLayer, GQABlock, MLABlock, RecurrentBlock
from inferplane.types import Placement
from tests.families.cases import CASES, config_of
from tests.families.recurrent import NEMOTRON_EXPERTS, RECURRENT


def config(family: str, **changes: Any) -> Config:
    """The family's first config as transformers writes it, with changes; those of `...` are left out."""
    theirs = config_of(family, next(iter(CASES[family]))).to_dict()
    names = [name for name, spelling in SPELLINGS.items() if spelling.model_type == theirs["model_type"]]
    entries = {**theirs, "architectures": names, **changes}
    return Config({key: value for key, value in entries.items() if value is not ...})


def kinds(family: str, **changes: Any) -> str:
    """A letter for each layer's first block: a for attention, r for a recurrent one, m for an MLP."""
    letters = {GQABlock: "a", MLABlock: "a", RecurrentBlock: "r", MLP: "m"}
    layers = build(Build(config(family, **changes))).layers
    return "".join(letters[type(layer.block if isinstance(layer, BlockLayer) else layer.attn)] for layer in layers)


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types = 'sliding_attention'"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layer_types = 'conv'"),
        ("nemotron_h", {**NEMOTRON_EXPERTS, "layers_block_type": ["moe"], "moe_latent_size": 8}, "moe_latent_size = 8"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        ("falcon_h1", {"mlp_bias": True}, "mlp_bias beside mlp_multipliers"),
        ("falcon_h1", {"key_multiplier": -0.5}, "key_multiplier is -0.5; attention with scores times 0 or less"),
        ("granitemoehybrid", {"attention_multiplier": 0}, "attention_multiplier is 0; attention with scores times"),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling is 0, by which the model would divide"),
        ("granitemoehybrid", {"layer_types": ["mamba", "conv", "mamba"]}, "layer_types = 'conv'"),
        ("lfm2", {"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types = 'linear_attention'"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func = 'softmax'"),
        ("kimi_linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ("kimi_linear", {"layer_types": ..., "linear_attn_config": {"kda_layers": [1, 2]}}, "layer_types = None"),
    ],
)
def test_what_is_not_implemented_is_refused(family, changes, match):
    with pytest.raises(UnsupportedModelError, match=match):
        build(Build(config(family, **changes)))


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types is not a list of 4 names"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3 cannot be shared equally"),
        ("qwen3_next", {"linear_key_head_dim": ...}, "lacks 'linear_key_head_dim'"),
        ("qwen3_5_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds num_experts = 8"),
        ("nemotron_h", {"layers_block_type": ...}, "lacks the kinds of its layers"),
        ("nemotron_h", {"layers_block_type": ..., "hybrid_override_pattern": ""}, "lacks the kinds of its layers"),
        ("nemotron_h", {"n_groups": 4}, "heads = 6 cannot be shared equally by groups = 4"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*, not a list of 5 numbers"),
        ("falcon_h1", {"ssm_out_multiplier": math.inf}, "ssm_out_multiplier is inf, not a finite number"),
        ("falcon_h1", {"mamba_d_ssm": 66}, "mamba_n_heads = 4 of 16 entries are not the 66 of the layer"),
        ("granitemoehybrid", {"num_local_experts": ...}, "lacks 'num_local_experts'"),
        ("granitemoehybrid", {"mamba_d_head": 24}, "mamba_n_heads = 4 of 24 entries are not the 128 of the layer"),
        ("granitemoehybrid", {"time_step_limit": [0.1]}, "time_step_limit is .*, not two numbers from 0"),
        ("granitemoehybrid", {"time_step_limit": [-0.1, 1]}, "time_step_limit is .*, not two numbers from 0"),
        ("qwen3_5", {"partial_rotary_factor": 2.0, "rope_parameters": ...}, "partial_rotary_factor is 2.0"),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 4 names"),
        ("kimi_linear", {"linear_num_heads": ...}, "lacks 'linear_num_heads'"),
        ("kimi_linear", {"linear_attn_config": [4]}, "linear_attn_config is not an object"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": ["1"]}}, "linear_attn_config is not an object"),
        ("kimi_linear", {"n_group": 3}, "8 experts cannot form 3 equal groups"),
    ],
)
def test_what_contradicts_itself_is_refused(family, changes, match):
    with pytest.raises(CheckpointError, match=match):
        build(Build(config(family, **changes)))


@pytest.mark.parametrize("family", RECURRENT)
def test_two_ranks_have_a_half_each(family):
    """Of every weight below a block that is divided, and of each sequence's states. The low rank of gates is whole."""
    places = Placement(), Placement.shared(0, 2), Placement.shared(1, 2)
    one, *both = (build(Build(config(family), placement=place)) for place in places)
    for mine in both:
        assert [2 * r.count_bytes(torch.float32) for r in mine.state_requests()] == [
            r.count_bytes(torch.float32) for r in one.state_requests()
        ]
        parts = dict(mine.weights())
        for path, weight in one.weights():
            if ".mixer." in path and "norm" not in path and "fg_a" not in path:
                assert 2 * math.prod(parts[path].shape) == math.prod(weight.shape), path


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_every_fourth_layer_attends_unless_the_config_says_otherwise(family):
    layers = {"layer_types": ..., "num_hidden_layers": 9}
    assert kinds(family, **layers) == "rrrarrrar" and kinds(family, **layers, full_attention_interval=2) == "rarararar"
    own = Build(config(family))
    assert not build(own).mtp and "mtp.*" in own.ignored


def test_kimi_linear_is_published_with_an_object_of_its_own():
    """Whose numbers count before those of transformers' entries, and whose layers count behind transformers' list."""
    layers = {"layer_types": ..., "num_hidden_layers": 6, "mlp_layer_types": ...}
    published = {"full_attn_layers": [2, 6], "kda_layers": [1, 3, 4, 5], "num_heads": 2, "head_dim": 8}
    assert kinds("kimi_linear", **layers) == "rrrrar"
    assert kinds("kimi_linear", **layers, linear_attn_config=published) == "rarrra"
    listed = {**layers, "layer_types": ["linear_attention"] * 6}
    assert kinds("kimi_linear", **listed, linear_attn_config=published) == "rrrrrr"
    model = build(Build(config("kimi_linear", **layers, linear_attn_config={**published, "short_conv_kernel_size": 3})))
    assert model.layers[0].attn.mixer.heads == 2 and model.layers[0].attn.mixer.conv.weight.shape == (3 * 2 * 8, 3)
    assert [layer.mlp.has_experts for layer in model.layers] == [False] + [True] * 5
    model = build(Build(config("kimi_linear", first_k_dense_replace=3, mlp_layer_types=...)))
    assert [layer.mlp.has_experts for layer in model.layers] == [False] * 3 + [True]


def test_kimi_linear_rotates_nothing():
    """Its entries for positions are zero turns, whatever rotary settings a config has."""
    attn = build(Build(config("kimi_linear", rope_theta=1e4), positions=7)).layers[3].attn
    table = attn.rope.table.make()
    assert table.shape == (7, 2, 8) and bool((table[:, 0] == 1).all()) and bool((table[:, 1] == 0).all())
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(replace(attn.rope, table=table)(x, torch.arange(5)), x)


def test_lfm2_names_its_layers_in_two_ways():
    layers = {"layer_types": ..., "num_hidden_layers": 4}
    assert kinds("lfm2", **layers) == "aaaa" and kinds("lfm2", **layers, full_attn_idxs=[1, 3]) == "rara"


def test_layers_of_one_block_are_named_in_two_ways():
    other = {"layers_block_type": ...}
    assert kinds("nemotron_h") == "rmamr" and kinds("nemotron_h", **other, hybrid_override_pattern="M*-M") == "ramr"
    assert kinds("nemotron_h", layers_block_type=["attention", "mamba", "mlp"]) == "arm"
    assert kinds("granitemoehybrid", layer_types=["mamba", "attention", "mamba"]) == kinds("granitemoehybrid") == "rar"


def test_steps_may_be_limited():
    limits = [0.25, {"__float__": "Infinity"}]
    for stated, found in ((limits, (0.25, math.inf)), (None, (0.0, math.inf)), ([0, 2], (0.0, 2.0))):
        model = build(Build(config("granitemoehybrid", time_step_limit=stated)))
        assert model.layers[0].attn.mixer.scan.dt_limits == found
    (scan,) = {layer.block.mixer.scan.dt_limits for layer in build(Build(config("nemotron_h"))).layers[::4]}
    assert scan == (0.001, math.inf)
