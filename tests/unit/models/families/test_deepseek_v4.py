"""DeepSeek-V4's configs: rotary settings in every spelling as transformers has them, names, ranks, what is refused."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.models.families.deepseek_v4 import RENAMES
from inferplane.models.reading.normalize import SPELLINGS
from inferplane.ops import CompressedBlock, HashMoE, HyperMTPLayer, MoE, SharedKVBlock
from inferplane.quant import format_of
from inferplane.types import Placement
from tests.unit.support.small import WHOLE_MODEL

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "topk_method": "noaux_tc",
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_nextn_predict_layers": 1,
}
"""The sizes of V4-Flash, with 5 of its layers."""
SPELLED = {
    "published": {},
    "without scaling": {"rope_scaling": None},
    "a factor of its own": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    "other bases": {"rope_theta": 5e4, "compress_rope_theta": 3e5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "a share": {"qk_rope_head_dim": None, "partial_rotary_factor": 0.25},
    "neither": {"qk_rope_head_dim": None},
    "by kind": {
        "rope_scaling": None,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 7e3, "partial_rotary_factor": 0.125},
            "compress": {**YARN, "rope_type": "yarn", "rope_theta": 2e5, "partial_rotary_factor": 0.125},
        },
    },
}
BY_KIND = {"main": {"rope_theta": 7e3}, "compress": {"rope_theta": 2e5}}
SPELLED["by kind, with one share"] = {
    "qk_rope_head_dim": None,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_parameters": {kind: {"rope_type": "default", **own} for kind, own in BY_KIND.items()},
}


def tree(mtp=False, placement=WHOLE_MODEL, **changes):
    entries = {k: v for k, v in {**FLASH, **changes}.items() if v is not ...}
    return build(Build(Config(copy.deepcopy(entries)), placement, mtp=mtp, positions=64))


@pytest.mark.parametrize("spelling", SPELLED)
def test_rotary_settings_in_every_spelling(spelling):
    entries = {k: v for k, v in {**FLASH, **SPELLED[spelling]}.items() if v is not None}
    theirs = DeepseekV4RotaryEmbedding(DeepseekV4Config(**copy.deepcopy(entries)))
    layers = build(Build(Config(copy.deepcopy(entries)), positions=64)).layers
    for kind, layer in (("main", layers[0]), ("compress", layers[2])):
        cos, sin = theirs(torch.zeros(1), torch.arange(64)[None], kind)
        table = layer.attn.unrotate.rope.table.make()
        torch.testing.assert_close(table, torch.stack((cos[0], sin[0]), 1), rtol=2e-5, atol=2e-6)


def test_the_schedule_of_layers():
    model = tree(mtp=True, num_hash_layers=2)
    kinds = [(type(layer.attn), type(layer.mlp)) for layer in model.layers]
    first, hashed = (SharedKVBlock, HashMoE), (CompressedBlock, MoE)
    assert kinds == [first, first, hashed, hashed, hashed]
    assert [layer.reads_ids for layer in model.layers] == [True, True, False, False, False]
    (mtp,) = model.mtp
    assert isinstance(mtp, HyperMTPLayer) and isinstance(mtp.layer.mlp, MoE) and type(mtp.layer.attn) is SharedKVBlock
    assert model.returns_streams and not tree().returns_streams
    assert mtp.embed.weight is model.embed.weight is model.embed_once.weight and mtp.head.weight is model.head.weight
    left_out = tree(compress_ratios=..., num_hash_layers=...)
    assert [type(layer.mlp) for layer in left_out.layers] == [HashMoE] * 3 + [MoE] * 2


def test_ranks_have_shares_of_heads_groups_and_experts():
    whole, part = tree(), tree(placement=Placement.shared(1, 4))
    assert (whole.layers[2].attn.heads, part.layers[2].attn.heads) == (64, 16)
    assert [len(model.layers[2].attn.o_a.parts) for model in (whole, part)] == [8, 2]
    assert part.layers[0].mlp.here == (64, 64) and part.layers[0].mlp.experts.gate_up.shape[0] == 64
    for model in (whole, part):
        assert model.layers[0].attn_pre.collapse.fn.shape == (24, 4 * 4096)
        assert model.layers[0].mlp.route.table.shape == (129280, 6)


@pytest.mark.parametrize("published", ["layers.3.", "model.layers.3.", "mtp.0."])
def test_published_names(published):
    read = published if published.startswith("model.") else f"model.{published}"

    def rename(name):
        for pattern, replacement in SPELLINGS["DeepseekV4ForCausalLM"].renames.items():
            name = re.sub(pattern, replacement, name)
        return name

    assert SPELLINGS["DeepseekV4ForCausalLM"].renames == RENAMES
    for name, want in {
        "attn.wq_a.weight": "self_attn.q_a_proj.weight",
        "attn.wo_a.scale": "self_attn.o_a_proj.weight_scale",
        "attn.kv_norm.weight": "self_attn.kv_norm.weight",
        "attn.norm.weight": "self_attn.kv_norm.weight",
        "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
        "attn.compressor.ape": "self_attn.compressor.position_bias",
        "attn.indexer.compressor.wgate.weight": "self_attn.indexer.compressor.gate_proj.weight",
        "attn.indexer.wq_b.scale": "self_attn.indexer.q_b_proj.weight_scale",
        "self_attn.compressor.indexer.q_b_proj.weight": "self_attn.indexer.q_b_proj.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight": "self_attn.indexer.weights_proj.weight",
        "self_attn.compressor.indexer.kv_norm.weight": "self_attn.indexer.compressor.kv_norm.weight",
        "hc_attn_scale": "attn_hc.scale",
        "ffn_hc.scale": "ffn_hc.scale",
        "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
        "ffn.gate.tid2eid": "mlp.gate.tid2eid",
        "ffn.experts.7.w2.scale": "mlp.experts.7.down_proj.weight_scale",
        "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    }.items():
        assert rename(published + name) == read + want
    for name, want in {
        "embed.weight": "model.embed_tokens.weight",
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "hc_head_fn": "model.hc_head.hc_fn",
        "model.hc_head.hc_base": "model.hc_head.hc_base",
        "mtp.0.norm.weight": "model.mtp.0.shared_head.norm.weight",
        "mtp.0.head.weight": "model.mtp.0.shared_head.head.weight",
        "mtp.0.hc_head_scale": "model.mtp.0.hc_head.hc_scale",
    }.items():
        assert rename(name) == want


def test_formats_by_the_config_alone():
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = Config({**FLASH, "expert_dtype": "fp4", "quantization_config": settings})
    find = format_of(config["quantization_config"], None)
    below = "model.layers.2."
    for name, want in {
        "self_attn.q_a_proj": "fp8_block",
        "self_attn.o_a_proj": "fp8_block",
        "self_attn.compressor.kv_proj": "plain",
        "self_attn.indexer.q_b_proj": "fp8_block",
        "self_attn.indexer.weights_proj": "plain",
        "self_attn.indexer.compressor.gate_proj": "plain",
        "mlp.experts.3.gate_proj": "mxfp4",
        "mlp.shared_experts.up_proj": "fp8_block",
        "mlp.gate": "plain",
    }.items():
        assert find(f"{below}{name}.weight") == want, name


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring_func": "tanh"},
        {"norm_topk_prob": False},
        {"n_shared_experts": 2},
        {"attention_bias": True},
        {"topk_method": "greedy"},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 2},
        {"compress_ratios": [0, 0, 4, 64, 4]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_implemented_is_refused(changes):
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        tree(**changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope_parameters", {"rope_scaling": ..., "rope_parameters": 3}),
        ("partial_rotary_factor", {"qk_rope_head_dim": ..., "partial_rotary_factor": "x"}),
        ("partial_rotary_factor", {"qk_rope_head_dim": ..., "partial_rotary_factor": 7}),
        ("partial_rotary_factor", {"qk_rope_head_dim": ..., "partial_rotary_factor": math.nan}),
        (
            "partial_rotary_factor",
            {"rope_scaling": ..., "rope_parameters": {k: {"partial_rotary_factor": 0} for k in BY_KIND}},
        ),
        ("head_dim = 512", {"qk_rope_head_dim": 1024}),
        ("index_head_dim = 128", {"qk_rope_head_dim": 256}),
        ("compress_rates", {"compress_rates": [4, 128]}),
        ("compress_rate_csa", {"compress_rate_csa": 0}),
        ("compress_ratios", {"compress_ratios": {"0": 4}}),
    ],
)
def test_impossible_entries_are_refused(name, changes):
    with pytest.raises(CheckpointError, match=name):
        tree(**changes)


def test_rates_of_older_configs():
    model = tree(compress_rate_csa=8, compress_rate_hca=64, compress_rates={"compressed_sparse_attention": 16})
    assert [layer.attn.compressor.compress.dims.rate for layer in list(model.layers)[2:4]] == [8, 64]
    assert model.layers[2].attn.indexer.compressor.compress.dims.rate == 8


def test_contradictions_are_refused():
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        tree(mlp_layer_types=["moe"])
    with pytest.raises(CheckpointError, match="exceeds n_routed_experts"):
        tree(num_experts_per_tok=300)
