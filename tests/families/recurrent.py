"""Configs of the families with recurrent layers."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_models import LLAMA3

DELTA: dict[str, Any] = {
    "head_dim": 32,
    "rms_norm_eps": 0.01,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
"""Sizes of delta nets. With a small epsilon their norms scale results near 0 up to mere rounding: transformers' float32
then differs by 6e-5 from its own float64."""

MAMBA: dict[str, Any] = {"rms_norm_eps": 0.01, "mamba_n_heads": 4, "mamba_d_state": 24, "mamba_n_groups": 2}
"""Sizes of Mamba-2, with the same epsilon."""

RECURRENT: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "lfm2": (
        "Lfm2Config",
        {"block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"]},
        {
            "mixed": {"rope": {**LLAMA3, "rope_theta": 1e6}},
            "odd": {
                "num_hidden_layers": 5,
                "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
                "num_key_value_heads": 1,
                "conv_bias": True,
                "conv_L_cache": 4,
                "block_multiple_of": 5,
                "block_ffn_dim_multiplier": 1.3,
                "norm_eps": 1e-3,
                "tie_word_embeddings": False,
                "vocab_size": 101,
            },
            "no_attention": {"layer_types": ["conv"] * 3, "block_auto_adjust_ff_dim": False, "use_cache": False},
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **DELTA,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
        {
            "mixed": {},
            "odd": {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "mlp_only_layers": [1],
                "num_experts": 5,
                "num_experts_per_tok": 5,
                "norm_topk_prob": False,
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 3,
                "linear_key_head_dim": 10,
                "linear_value_head_dim": 24,
                "linear_conv_kernel_dim": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "vocab_size": 101,
                "rope": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            },
            "some_dense": {"decoder_sparse_step": 2, "num_hidden_layers": 2, "full_attention_interval": 2},
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**DELTA, "num_hidden_layers": 4},
        {
            "plain": {},
            "odd": {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 3,
                "linear_key_head_dim": 10,
                "linear_value_head_dim": 6,
                "linear_conv_kernel_dim": 5,
                "num_key_value_heads": 4,
                "head_dim": 20,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "vocab_size": 101,
                "rope": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.3,
                    "mrope_interleaved": True,
                    "mrope_section": [1, 1, 1],
                },
            },
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            "num_hidden_layers": 3,
            "full_attention_interval": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
        {
            "plain": {},
            "one_expert": {
                "num_hidden_layers": 2,
                "full_attention_interval": 2,
                "num_experts": 1,
                "num_experts_per_tok": 1,
                "linear_num_value_heads": 2,
                "linear_value_head_dim": 16,
                "vocab_size": 101,
            },
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        {
            "experts": {},
            "dense": {
                "num_local_experts": 0,
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
                "position_embedding_type": "rope",
                "mamba_n_groups": 3,
                "mamba_n_heads": 6,
                "mamba_expand": 3,
                "mamba_d_conv": 3,
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
                "time_step_limit": (0.1, 0.9),
                "attention_bias": True,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
                "vocab_size": 101,
            },
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": ...,
            "head_dim": 24,
            "layer_norm_epsilon": 0.01,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
        },
        {
            "mixed": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
            "odd": {
                "layers_block_type": ["mlp", "linear_attention", "linear_attention", "full_attention"],
                "head_dim": 10,
                "num_key_value_heads": 1,
                "n_groups": 3,
                "conv_kernel": 2,
                "use_conv_bias": False,
                "use_bias": True,
                "mlp_bias": True,
                "intermediate_size": 37,
                "vocab_size": 101,
            },
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**MAMBA, "head_dim": 24, "mamba_d_ssm": 64},
        {
            "factors": {
                "lm_head_multiplier": 0.5,
                "embedding_multiplier": 3.0,
                "mlp_multipliers": [0.8, 0.4],
                "key_multiplier": 0.7,
                "attention_in_multiplier": 1.3,
                "attention_out_multiplier": 0.9,
                "ssm_multipliers": [0.9, 0.7, 1.4, 0.6, 1.2],
                "ssm_in_multiplier": 1.1,
                "ssm_out_multiplier": 0.5,
            },
            "norms": {
                "num_hidden_layers": 2,
                "head_dim": 10,
                "num_key_value_heads": 1,
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                "mamba_d_ssm": None,
                "mamba_n_heads": 8,
                "mamba_n_groups": 4,
                "mamba_d_conv": 3,
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
                "projectors_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
                "vocab_size": 101,
                "rope": {"rope_type": "default", "rope_theta": 1e11},
            },
            "norm_before_gate": {"mamba_rms_norm": True, "num_hidden_layers": 2},
        },
    ),
}
