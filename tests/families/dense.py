"""Configs of the dense families."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_models import LLAMA3, YARN

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.1 * i for i in range(6)],
    "long_factor": [1 + 0.7 * i for i in range(6)],
}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ODD = {"vocab_size": 101, "num_key_value_heads": 1, "intermediate_size": 123}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

DENSE: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "phi3": (
        "Phi3Config",
        {},
        {
            "partial": {  # the model's whole length lies in the first context: no sequence changes its factors
                "rope": {**LONGROPE, "partial_rotary_factor": 0.75, "attention_factor": 1.2},
                "original_max_position_embeddings": 512,
            },
            "window": {**ODD, "sliding_window": 13, "tie_word_embeddings": True},
        },
    ),
    "olmo2": (
        "Olmo2Config",
        {},
        {"plain": {}, "bias": {**ODD, "attention_bias": True, "tie_word_embeddings": True, "rope": YARN}},
    ),
    "olmo3": (
        "Olmo3Config",
        {},
        {
            "mixed": {"sliding_window": 13, "num_hidden_layers": 5},
            "yarn": {
                **ODD,
                "sliding_window": 21,
                "layer_types": MIXED,
                "rope": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
            },
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {},
        {
            "every_fourth": {"num_hidden_layers": 5},
            "marked": {
                **ODD,
                "no_rope_layers": [0, 1, 0],
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": False,
                "use_sliding_window": True,
                "sliding_window": 13,
            },
        },
    ),
    "seed_oss": (
        "SeedOssConfig",
        {},
        {
            "bias": {"head_dim": 24},
            "all_biases": {**ODD, "head_dim": 10, "attention_out_bias": True, "mlp_bias": True},
            "no_bias": {"head_dim": 22, "attention_bias": False, "tie_word_embeddings": True},
        },
    ),
    "granite": (
        "GraniteConfig",
        {},
        {
            "factors": {
                "embedding_multiplier": 3.0,
                "logits_scaling": 0.4,
                "residual_multiplier": 0.3,
                "attention_multiplier": 0.09,
            },
            "below_0": {"embedding_multiplier": -3.0, "logits_scaling": -0.4, "residual_multiplier": -0.3},
            "bias": {
                **ODD,
                "embedding_multiplier": 0.7,
                "attention_multiplier": 0.2,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        },
    ),
    "glm": (
        "GlmConfig",
        {"head_dim": 24},
        {
            "half": {"rope": {**HALF, "partial_rotary_factor": 0.5}},
            "whole": {**ODD, "rope": YARN, "attention_bias": False},
        },
    ),
    "glm4": (
        "Glm4Config",
        {"head_dim": 24},
        {"half": {"rope": HALF}, "quarter": {**ODD, "head_dim": 40, "rope": {**HALF, "partial_rotary_factor": 0.25}}},
    ),
    "ernie4_5": (
        "Ernie4_5Config",
        {"head_dim": 24},
        {"tied": {}, "bias": {**ODD, "head_dim": 10, "use_bias": True, "tie_word_embeddings": False}},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {"head_dim": 24},
        {
            "alpha": {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}},
            "bias": {**ODD, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {},
        {
            "mixed": {"sliding_window": 13, "num_hidden_layers": 5},
            "full": {**ODD, "sliding_window": None, "layer_types": ["full_attention"] * 3, "rope": LLAMA3},
            "named": {"sliding_window": 21, "layer_types": MIXED, "tie_word_embeddings": True},
        },
    ),
    "cohere": (
        "CohereConfig",
        {"logit_scale": 0.7},
        {
            "tied": {},
            "norms": {**ODD, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
            "heads": {"use_qk_norm": True},
            "below_0": {"logit_scale": -0.7},
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 0.7},
        {
            "mixed": {"sliding_window": 13, "num_hidden_layers": 5},
            "named": {**ODD, "sliding_window": 21, "layer_types": MIXED, "attention_bias": True},
        },
    ),
    "ministral": (
        "MinistralConfig",
        {},
        {
            "window": {"sliding_window": 13, "head_dim": 16},
            "mixed": {**ODD, "sliding_window": 21, "layer_types": MIXED, "head_dim": 20, "tie_word_embeddings": True},
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {},
        {
            "factors": {"head_dim": 24, "rope": {**YARN, "llama_4_scaling_beta": 0.3}},
            "window": {**ODD, "head_dim": 20, "sliding_window": 13, "rope": {**YARN, "llama_4_scaling_beta": 0.1}},
        },
    ),
    "arcee": (
        "ArceeConfig",
        {},
        {"plain": {}, "bias": {**ODD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}},
    ),
    "helium": (
        "HeliumConfig",
        {"head_dim": 16},
        {"plain": {}, "bias": {**ODD, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}},
    ),
    "starcoder2": (
        "Starcoder2Config",
        {},
        {"bias": {"num_key_value_heads": 2}, "window": {**ODD, "use_bias": False, "sliding_window": 13}},
    ),
    "gemma": (
        "GemmaConfig",
        {"head_dim": 24},
        {"tied": {}, "bias": {**ODD, "head_dim": 40, "attention_bias": True, "tie_word_embeddings": False}},
    ),
}
