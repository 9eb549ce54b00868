"""Families with mixtures of experts: what their constructors refuse, ignore and read from their own entries."""

from __future__ import annotations

from typing import Any

import pytest

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.ops import GatedMLP, MoE
from tests.families.cases import CASES, config_of


def config(family: str, **changes: Any) -> Config:
    """The family's first config as transformers writes it, with changes."""
    theirs = config_of(family, next(iter(CASES[family])))
    return Config({**theirs.to_dict(), "architectures": [f"{type(theirs).__name__[:-6]}ForCausalLM"], **changes})


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not implemented"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True is not implemented"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
        ("hy_v3", {"qk_norm": False}, "qk_norm = False"),
        ("hy_v3", {"route_norm": False}, "route_norm = False"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla = True"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "both"]}, "mlp_layer_types = 'both'"),
        ("dots1", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_is_not_implemented_is_refused(family, changes, match):
    with pytest.raises(UnsupportedModelError, match=match):
        build(Build(config(family, **changes)))


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("hunyuan_v1_moe", {"moe_topk": [1]}, "moe_topk is not one number, or a list of 2"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 9]}, "moe_topk = 9 exceeds num_experts = 8"),
        ("hunyuan_v1_moe", {"moe_topk": [1, "two"]}, "moe_topk"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k = 9 exceeds moe_num_experts = 8"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 2 names"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3, not a list"),
        ("dots1", {"n_group": 3}, "8 experts cannot form 3 equal groups"),
        ("solar_open", {"n_group": 8, "topk_group": 3}, "n_group = 8 leaves 1 expert per group"),
        ("minimax_m2", {"rotary_dim": 48, "rope_parameters": None}, "partial_rotary_factor is 2.0"),
    ],
)
def test_what_contradicts_itself_is_refused(family, changes, match):
    with pytest.raises(CheckpointError, match=match):
        build(Build(config(family, **changes)))


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite"])
def test_layers_that_draft_are_expected_and_not_read(family):
    own = Build(config(family, num_nextn_predict_layers=2))
    model = build(own)
    assert not model.mtp and {"model.layers.2.*", "model.layers.3.*"} <= set(own.ignored)


@pytest.mark.parametrize(
    ("family", "changes", "sparse"),
    [
        (
            "dots1",
            {"num_hidden_layers": 4, "first_k_dense_replace": 3, "layer_types": None},
            [False, False, False, True],
        ),
        ("solar_open", {}, [True, True]),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, [True, False]),
        (
            "qwen2_moe",
            {"num_hidden_layers": 4, "decoder_sparse_step": 2, "layer_types": None},
            [False, True, False, True],
        ),
        ("qwen2_moe", {"mlp_only_layers": [0]}, [False, True]),
        (
            "ernie4_5_moe",
            {"num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2},
            [False, True, False, True, False],
        ),
    ],
)
def test_which_layers_have_experts(family, changes, sparse):
    blocks = [layer.mlp for layer in build(Build(config(family, **changes))).layers]
    assert [isinstance(block, MoE) for block in blocks] == sparse
    assert all(isinstance(block, (MoE, GatedMLP)) for block in blocks)


def test_layers_may_choose_different_numbers_of_experts():
    layers = build(Build(config("hunyuan_v1_moe", moe_topk=[1, 5]))).layers
    assert [layer.mlp.route.top_k for layer in layers] == [1, 5]
