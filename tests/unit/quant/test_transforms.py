"""Rotations that a checkpoint states: which are carried out, which need nothing, and which are refused."""

from __future__ import annotations

import pytest

from inferplane.errors import UnsupportedModelError
from inferplane.models import Build, Config, llama
from inferplane.models.registry import build
from inferplane.ops import RotatedActivation
from inferplane.quant.instructions import (
    InputRotation,
    describe_rotations,
    find_rotations,
    read_rotations,
    take_transforms,
)
from inferplane.types import Placement
from tests.unit.support.small import LLAMA, WHOLE_MODEL
from tests.vendors.configs import FAMILIES

DOWN = "re:.*down_proj$"


def scheme(location="input", targets=(DOWN,), **changes):
    args = {"targets": list(targets), "location": location, "inverse": False, "ignore": []}
    found = {"type": "hadamard", "apply": [args], "randomize": False, "requires_grad": False, "head_dim": 32}
    return {"config_groups": {"R": {**found, **changes}}}


def test_what_is_written_is_read():
    stated = describe_rotations({32: [DOWN], 8: ["model.layers.0.mlp.down_proj"]})
    found = read_rotations(stated)
    assert set(found) == {InputRotation((DOWN,), (), 32), InputRotation(("model.layers.0.mlp.down_proj",), (), 8)}
    for config in ({"transform_config": stated}, {"quantization_config": {"transform_config": stated}}):
        assert find_rotations(config) == found and take_transforms(config) == stated
        assert "transform_config" not in config
    assert find_rotations({}) == find_rotations({"quantization_config": None}) == ()


@pytest.mark.parametrize("stated", [None, {}, {"config_groups": {}}, scheme("weight_input"), scheme("weight_output")])
def test_what_is_folded_needs_nothing(stated):
    assert read_rotations(stated) == ()


def test_random_matrices_that_are_folded_need_nothing():
    assert read_rotations(scheme("weight_output", type="random-hadamard", randomize=True, head_dim=None)) == ()


@pytest.mark.parametrize(
    "stated",
    [
        scheme(type="random-hadamard"),
        scheme(type="random-matrix"),
        scheme(randomize=True),
        scheme(head_dim=48),
        scheme("output"),
        scheme("q_attn"),
        scheme("k_cache"),
        scheme(targets=["Linear"]),
        scheme(targets=["re:.*(down_proj"]),
        scheme(targets=[3]),
        scheme(apply="input"),
        scheme(other=1),
        {"config_groups": {"R": {"type": "hadamard"}}},
        {"config_groups": ["R"]},
        {"R": {}},
        ["R"],
    ],
)
def test_what_is_not_carried_out(stated):
    assert read_rotations(stated) is None


def test_ignored_modules():
    (found,) = read_rotations(
        {
            "config_groups": {
                "R": {
                    **scheme()["config_groups"]["R"],
                    "apply": [{"targets": [DOWN], "location": "input", "ignore": ["model.layers.1.mlp.down_proj"]}],
                }
            }
        }
    )
    assert found.includes("model.layers.0.mlp.down_proj") and not found.includes("model.layers.1.mlp.down_proj")
    assert not found.includes("model.layers.0.mlp.up_proj")


def tree(config=LLAMA, placement=WHOLE_MODEL, **changes):
    return build(Build(Config({**config, "transform_config": scheme(**changes)}), placement, positions=64))


def test_a_gated_mlp_rotates_what_down_reads():
    for layer in tree().layers:
        assert isinstance(layer.mlp.act, RotatedActivation) and layer.mlp.act.block == 32
    whole = llama(Build(Config({**LLAMA, "intermediate_size": 64, "transform_config": scheme(head_dim=None)})))
    assert whole.layers[0].mlp.act.block == 64


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"reads .* columns that are rotated in blocks of 1024"):
        tree(head_dim=1024)
    with pytest.raises(UnsupportedModelError, match=r"columns that are rotated.*fewer ranks"):
        tree({**LLAMA, "vocab_size": 96, "intermediate_size": 64}, Placement.shared(0, 2), head_dim=64)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_rotated_inputs_of_experts_are_refused(family):
    """They would be wrong in silence."""
    with pytest.raises(UnsupportedModelError, match=r"input of .*experts.* is rotated while running"):
        tree(FAMILIES[family], targets=[r"re:.*experts\..*"])
    with pytest.raises(UnsupportedModelError, match=r"input of .*_proj is rotated while running"):
        tree(targets=["re:.*self_attn.*"])
