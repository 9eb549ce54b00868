"""Configs of multimodal families whose text part has a form of its own, with a small vision part."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_models import LLAMA3, SMALL

VISION: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    **{"mlp_ratio": 2.0, "max_position_embeddings": 4},
}
TEXT: dict[str, Any] = {
    **SMALL,
    **{"head_dim": 16, "sliding_window": 13, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 40, "share_expert_dim": 48, "pad_token_id": 1, "bos_token_id": None},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def whole(**text: Any) -> dict[str, Any]:
    """The entries of a whole model, of which those of the text part change."""
    return {**dict.fromkeys(SMALL, ...), "text_config": {**TEXT, **text}, "vision_config": VISION}


WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "step3p7": (
        "Step3p7Config",
        {},
        {
            "mixed": whole(
                num_hidden_layers=4,
                layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                mlp_layer_types=["dense", "sparse", "dense", "sparse"],
                num_sliding_attention_heads=6,
                swiglu_limits=[0.0, 0.4, 0.0, 0.0],
                swiglu_limits_shared=[0.5, 0.3, None, 0.0],
                moe_router_scaling_factor=1.7,
                rope_parameters={
                    "full_attention": {**LLAMA3, "rope_theta": 5e6, "partial_rotary_factor": 1.0},
                    "sliding_attention": {**ROPE, "partial_rotary_factor": 1.0},
                },
            ),
            "odd": whole(
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                mlp_layer_types=["sparse", "sparse", "dense"],
                num_attention_heads=3,
                num_sliding_attention_heads=2,
                num_key_value_heads=1,
                head_dim=20,
                sliding_window=5,
                query_pre_attn_scalar=7,
                n_routed_experts=5,
                num_experts_per_tok=5,
                attention_bias=True,
                mlp_bias=True,
                vocab_size=101,
                rope_parameters={
                    "full_attention": {**ROPE, "partial_rotary_factor": 0.5},
                    "sliding_attention": {**ROPE, "partial_rotary_factor": 0.3},
                },
            ),
        },
    ),
}
