"""Configs of the families with recurrent layers."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_models import LLAMA3

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
}
