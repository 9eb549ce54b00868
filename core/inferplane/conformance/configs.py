"""The models of the suite: tiny ones with odd sizes, and two layers at the true sizes of published models."""

from __future__ import annotations

from typing import Any

from inferplane.models import Build, Config, build
from inferplane.ops import CausalLM

POSITIONS = 512

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "rope_theta": 10000.0,
}

_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "max_position_embeddings": POSITIONS,
    "rope_theta": 10000.0,
}

_V3_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

TINY: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_tied_scaled": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v3": _DEEPSEEK,
    # V3's head sizes with few heads, so that kernels for these sizes are chosen.
    "deepseek_v3_heads": {
        **_DEEPSEEK,
        **_V3_HEADS,
        "q_lora_rank": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    },
    # All tokens are chosen: in 16 bits, rounding decides between scores that are almost equal.
    "glm_moe_dsa": {
        **_DEEPSEEK,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "q_lora_rank": 24,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": POSITIONS,
        "indexer_types": ["full", "shared"],
    },
}

# The vocabulary is small: only the embedding and the head depend on it, and their ops have samples of their own.
SLICES: dict[str, dict[str, Any]] = {
    "llama_8b_two_layers": {
        **_LLAMA,
        "vocab_size": 2048,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    "deepseek_v3_two_layers": {
        **_DEEPSEEK,
        **_V3_HEADS,
        "vocab_size": 2048,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "num_experts_per_tok": 4,
    },
}
"""One dense layer and one with 8 experts for DeepSeek-V3; sizes as in the published config.json files."""


def model(config: dict[str, Any]) -> CausalLM:
    """Build the tree of ops; nothing is allocated."""
    return build(Build(Config(config), positions=POSITIONS))
