"""The dense families: sizes of published models, rotary settings of their own, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import CONFIG_MAPPING

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.models.rope import frequencies
from inferplane.ops import PartialRope
from inferplane.types import Placement


def published(architecture, layers, width, inner, heads, kv_heads, vocab, **more):
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


PHI3_MINI = published("Phi3", 32, 3072, 8192, 32, 32, 32064)
OLMO2_7B = published("Olmo2", 32, 4096, 11008, 32, 32, 100352)
COMMAND_R7B = published("Cohere2", 32, 4096, 14336, 32, 8, 256000)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (PHI3_MINI, 3_821_079_552),
        (OLMO2_7B, 7_298_617_344),
        (published("SmolLM3", 36, 2048, 11008, 16, 4, 128256), 3_075_098_624),
        (published("Granite", 40, 2048, 8192, 32, 8, 49155, tie_word_embeddings=True), 2_533_531_648),
        (published("Glm4", 40, 4096, 13696, 32, 2, 151552), 9_400_279_040),
        (COMMAND_R7B, 8_028_033_024),
        (published("Starcoder2", 30, 3072, 12288, 24, 2, 49152), 3_030_371_328),
        (published("Gemma", 18, 2048, 16384, 8, 1, 256000), 2_506_172_416),
    ],
)
def test_parameters_of_published_models(config, want):
    """Counts as the published safetensors state them."""
    made = {id(w): w for _, w in build(Build(Config(config), positions=64)).weights() if w.parts}
    assert sum(math.prod(w.shape) for w in made.values()) == want


# ------------------------------------------------------------------ rotary settings


def ropes(config, positions=64):
    return [layer.attn.enter.rope for layer in build(Build(Config(config), positions=positions)).layers]


def table_of(settings, dim, positions=64):
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies(settings, dim, positions)[0]
    return torch.stack((angle.cos(), angle.sin()), 1) * frequencies(settings, dim, positions)[1]


LONG = {"long_factor": [2.0] * 36, "short_factor": [1.0] * 36}


@pytest.mark.parametrize("name", ["su", "longrope", "yarn"])
def test_phi3_under_each_name_of_longrope(name):
    """The published configs say "su", "longrope" or "yarn" and mean the same."""
    entries = {
        **PHI3_MINI,
        "model_type": "phi3",
        "num_hidden_layers": 1,
        "hidden_size": 32 * 96,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": name, **LONG},
    }
    config = Config(entries)
    assert Config(dict(config)) == config
    assert config.rope["rope_type"] == "longrope"
    if name != "su":  # which transformers refuses where the context stands on the top level, as in the first exports
        assert CONFIG_MAPPING["phi3"].from_dict(entries).rope_parameters["rope_type"] == "longrope"
    for positions in (64, 5000):
        rope = ropes(entries, positions)[0]
        assert isinstance(rope, PartialRope) and rope.size == 72
        settings = {**LONG, "rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0}
        want = table_of({**settings, "original_max_position_embeddings": 4096}, 72, positions)
        torch.testing.assert_close(rope.rope.table.make(), want)


def test_phi3_has_no_other_scaling():
    with pytest.raises(UnsupportedModelError, match="rope_type = 'linear'"):
        build(Build(Config({**PHI3_MINI, "rope_scaling": {"type": "linear", "factor": 2.0}})))


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": YARN, "rope_theta": 500000},
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
            }
        },
    ],
)
def test_olmo3_scales_full_layers_only(spelling):
    """As the published configs spell it, and as transformers writes it."""
    entries = {**OLMO2_7B, "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4, **spelling}
    entries["max_position_embeddings"] = 256
    found = ropes(entries)
    plain = table_of({"rope_type": "default", "rope_theta": 5e5}, 128)
    for rope in found[:3]:
        torch.testing.assert_close(rope.table.make(), plain)
    torch.testing.assert_close(found[3].table.make(), table_of({**YARN, "rope_theta": 5e5}, 128))
    assert Config(entries).positions == 256


def test_layers_without_rotation():
    smol = published("SmolLM3", 5, 64, 112, 4, 2, 160)
    assert [rope is None for rope in ropes(smol)] == [False, False, False, True, False]
    marked = {**smol, "no_rope_layers": [0, 1, 1, 0, 1]}
    assert [rope is None for rope in ropes(marked)] == [True, False, False, True, False]
    assert [rope is None for rope in ropes({**COMMAND_R7B, "num_hidden_layers": 4})] == [False, False, False, True]
    exaone = published("Exaone4", 4, 64, 112, 4, 2, 160)
    assert [rope is None for rope in ropes(exaone)] == [False, False, False, True]
    assert not any(rope is None for rope in ropes({**exaone, "sliding_window": None}))
    with pytest.raises(CheckpointError, match="no_rope_layers is not a list of 5 numbers"):
        ropes({**smol, "no_rope_layers": [1, 0]})


def test_ministral3_needs_its_factors():
    entries = published("Ministral3", 1, 64, 112, 4, 2, 160)
    factors = build(Build(Config(entries), positions=40000)).layers[0].attn.enter.q_factors.make()
    assert factors[16383] == 1 and factors[16384] == pytest.approx(1 + 0.1 * math.log(2))
    broken = {**entries, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta = None"):
        build(Build(Config(broken)))


@pytest.mark.parametrize("share", [0, 1.5, -0.5, "half"])
def test_shares_that_are_none(share):
    entries = published("Glm4", 1, 64, 112, 4, 2, 160, partial_rotary_factor=share)
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        build(Build(Config(entries)))


# ------------------------------------------------------------------ ranks, quantized projections


def test_norms_over_all_heads_on_ranks():
    """Each rank has its heads' part of the weight, and sums over the ranks."""
    model = build(Build(Config(OLMO2_7B), Placement.shared(1, 2)))
    enter = model.layers[0].attn.enter
    assert enter.q_norm.weight.shape == (2048,) and enter.q_norm.width == 4096 and enter.q_norm.reduce is not None
    with pytest.raises(UnsupportedModelError, match="norms over 2 heads on 4 ranks"):
        build(Build(Config({**OLMO2_7B, "num_key_value_heads": 2}), Placement.shared(0, 4)))


def test_projections_that_are_stored_as_one():
    """Plain ones are read part by part, on any number of ranks; quantized ones as they are stored, on one."""
    names = {name for _, w in build(Build(Config(PHI3_MINI))).weights() for name in w.parts}
    assert "model.layers.0.self_attn.q_proj.weight" in names and not any("qkv" in name for name in names)
    quantized = {**PHI3_MINI, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    names = {name for _, w in build(Build(Config(quantized))).weights() for name in w.parts}
    assert {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"} <= names
    with pytest.raises(UnsupportedModelError, match="stored as one, on several ranks"):
        build(Build(Config(quantized), Placement.shared(0, 2)))


def test_gemma_means_the_approximation_by_gelu():
    entries = published("Gemma", 1, 64, 112, 4, 2, 160, head_dim=16)
    functions = {
        build(Build(Config({**entries, "hidden_act": act}))).layers[0].mlp.act.function
        for act in ("gelu", "gelu_pytorch_tanh")
    }
    assert functions == {"gelu_tanh"}
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        build(Build(Config({**entries, "use_bidirectional_attention": True})))
