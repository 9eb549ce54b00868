"""Configs of the families with other attention: sinks, soft caps, windows mixed with full attention."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_models import YARN

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}

MIMO_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.35},
}

ATTENTION: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 13, "rope": DEFAULT},
        {
            "yarn": {"rope": {**YARN, "rope_theta": 150000.0, "truncate": False}},
            "all_experts": {
                "num_local_experts": 4,
                "num_experts_per_tok": 4,
                "head_dim": 10,
                "num_key_value_heads": 1,
                "attention_bias": False,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 5,
                "swiglu_alpha": 1.1,
                "swiglu_limit": 0.7,
                "intermediate_size": 37,
                "tie_word_embeddings": True,
                "vocab_size": 101,
            },
            "one_expert": {"num_local_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2},
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 13,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "num_key_value_heads": 1,
            "attn_implementation": "eager",
        },
        {
            "mixed": {
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "n_group": 4,
                "topk_group": 2,
                "rope": MIMO_ROPE,
            },
            "odd": {
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 20,
                "v_head_dim": 10,
                "sliding_window": 5,
                "n_routed_experts": 5,
                "num_experts_per_tok": 5,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.7,
                "attention_value_scale": None,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "vocab_size": 101,
                "rope": {kind: {**own, "partial_rotary_factor": 0.3} for kind, own in MIMO_ROPE.items()},
            },
            "one_kind": {"layer_types": ["full_attention"] * 3, "attention_value_scale": 1.3, "rope": MIMO_ROPE},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 13, "attn_implementation": "eager"},
        {
            "caps": {"attn_logit_softcapping": 5.0},
            "no_score_cap": {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": 3.0,
                "head_dim": 10,
                "query_pre_attn_scalar": 7,
                "num_key_value_heads": 1,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "num_hidden_layers": 4,
                "sliding_window": 5,
                "vocab_size": 101,
            },
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 13},
        {
            "scaled": {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
                "rope": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            "logit_cap": {
                "num_hidden_layers": 7,
                "head_dim": 16,
                "num_key_value_heads": 1,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "final_logit_softcapping": 4.0,
                "sliding_window": 3,
                "vocab_size": 101,
            },
        },
    ),
}
