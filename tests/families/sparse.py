"""Configs of the families whose attention reads chosen tokens: contexts are below, at and far beyond their number."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_models import YARN

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "index_n_heads": 24,
    "index_head_dim": 32,
    "index_topk": 16,
}

V4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "intermediate_size": ...,  # of transformers' class another name of the size of an expert
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 20,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "index_topk": 6,
    "num_nextn_predict_layers": 0,
}

SPARSE: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "deepseek_v32": (
        "DeepseekV32Config",
        SIZES,
        {
            "plain": {},
            "odd": {
                "num_hidden_layers": 3,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 4,
                "norm_topk_prob": False,
                "qk_nope_head_dim": 12,
                "v_head_dim": 20,
                "index_n_heads": 19,
                "index_head_dim": 16,
                "index_topk": 7,
                "vocab_size": 101,
                "tie_word_embeddings": True,
            },
            "yarn": {"rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-3, "index_topk": 24},
            "all": {"index_topk": 512, "attention_bias": True},
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        SIZES,
        {
            "shared": {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
            "each": {"index_topk": 21, "index_head_dim": 40, "num_hidden_layers": 3, "vocab_size": 101},
            "period": {"num_hidden_layers": 5, "index_topk_freq": 3, "index_skip_topk_offset": 2, "index_topk": 11},
            "pattern": {
                "num_hidden_layers": 4,
                "index_topk_pattern": "FSSF",
                "n_group": 2,
                "topk_group": 2,
                "index_topk": 13,
            },
        },
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        V4,
        {
            "all": {
                "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
                "mlp_layer_types": ["hash_moe", "moe", "hash_moe"],
                "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
                "swiglu_limit": 0.5,
            },
            "window": {"layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["hash_moe", "moe", "moe"]},
            "yarn": {
                "num_hidden_layers": 4,
                "rope": {**YARN, "original_max_position_embeddings": 64},
                "index_topk": 24,
                "num_experts_per_tok": 1,
            },
            "streams": {
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "compressed_sparse_attention"],
                "mlp_layer_types": ["moe", "moe"],
                "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 32},
                "index_topk": 11,
                "hc_mult": 3,
                "hc_sinkhorn_iters": 2,
                "hc_eps": 1e-3,
                "rms_norm_eps": 1e-3,
                "scoring_func": "sigmoid",
                "routed_scaling_factor": 2.5,
                "o_groups": 4,
                "q_lora_rank": 19,
                "vocab_size": 101,
                "sliding_window": 9,
                "tie_word_embeddings": True,
            },
        },
    ),
}
