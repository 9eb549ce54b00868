"""What is bound for DeepSeek-V3.2 and GLM-5 on a GPU that need not be here: sparse attention by kernels of its own."""

from __future__ import annotations

from typing import Any

import pytest

from inferplane.binding import explain
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.plugins import host

V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 3, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "max_position_embeddings": 163840, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "hidden_act": "silu",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "tie_word_embeddings": False, "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""As published, with fewer layers."""
GLM_5 = {**V32, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_attention_heads": 64,
         "index_n_heads": 32, "indexer_types": ["full", "shared"] * 2, "quantization_config": None}  # fmt: skip
OF_SPARSE_ATTENTION = {
    "layer_norm", "partial_rope", "index_key_write", "index_select", "sparse_mla_absorbed", "sparse_mla_expanded",
}  # fmt: skip
BY_TORCH = {"embedding", "lm_head", "linear"}
"""Ops that torch's own operators may compute: products of unquantized weights, and a gather."""


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("arch", ["sm90a", "sm80"])
@pytest.mark.parametrize("config", [V32, GLM_5], ids=["V3.2", "GLM-5"])
def test_nothing_of_a_decode_step_is_composed(config, arch, kv):
    given = {name: value for name, value in config.items() if value is not None}
    options = RunnerOptions(dtype="bfloat16", arch=arch, kv_cache_dtype=kv)
    plan = Runner.plan_only(ModelFiles(given), host(), "cuda", options).plan
    sites = [s for s in explain(plan)["sites"] if s["step_kind"] == "decode"]
    bound = {s["op"]: s["chosen"]["provider"] for s in sites if s["op"] in {*OF_SPARSE_ATTENTION, "rotate_index_keys"}}
    assert bound == dict.fromkeys(OF_SPARSE_ATTENTION | ({"rotate_index_keys"} if kv == "fp8" else set()), "triton")
    others = {s["op"] for s in sites if s["chosen"]["provider"].startswith(("torch", "reference"))}
    assert others <= BY_TORCH
