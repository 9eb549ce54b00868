"""Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from inferplane.models.build import Build
from inferplane.models.parts import (
    LayerForm,
    decoder_model,
    experts_per_token,
    grouped_query_attention,
    head_size,
    mixture_of_experts,
    rotate_all,
    rotation,
    sliding_window,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, LayerNorm, MoE, MoERoute

COUNT, PARTS = "num_local_experts", ("w1", "w3", "w2")


@architecture(
    "PhimoeForCausalLM",
    model_type="phimoe",
    defaults={
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "attention_bias": False, "lm_head_bias": False,
    },
    expert_names=("block_sparse_moe", *PARTS),
)  # fmt: skip
def phimoe(build: Build) -> CausalLM:
    """Phi-3.5-MoE: layer norms; two experts a token, each weighed by a softmax over the logits near its own; biases in
    attention and head; LongRoPE with factors of its own on cosines and sines.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: GRIN, arXiv 2409.12136; arXiv 2404.14219.
    """
    config = build.config
    config.refuse(num_experts_per_tok=(2,))
    bias, jitter = config.flag("attention_bias"), config.number("router_jitter_noise")
    route = MoERoute(None, experts_per_token(config, COUNT), jitter=jitter)
    ropes = rotate_all(build, rotation(build, head_size(config), settings=_rotary_settings(build)))
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=sliding_window(config), ropes=ropes)

    def mlp(i: int, name: str) -> MoE:
        name = f"model.layers.{i}.block_sparse_moe"
        return mixture_of_experts(build, name, route, count=COUNT, inner="intermediate_size", parts=PARTS)

    form = LayerForm(norm=_layer_norm)
    return decoder_model(build, attention, mlp, form, head_bias=config.flag("lm_head_bias"))


def _layer_norm(build: Build, name: str, width: int) -> LayerNorm:
    return build.layer_norm(name, width, "rms_norm_eps", bias=True)


def _rotary_settings(build: Build) -> dict[str, Any]:
    """The rotary settings with this family's factor on cosines and sines, which depends on the longest sequence."""
    config, settings = build.config, build.config.rope
    config.check("rope_type", settings["rope_type"], ("default", "longrope"))
    if settings["rope_type"] == "default":
        return settings
    is_long = build.positions > (settings.get("original_max_position_embeddings") or 0)
    return {**settings, "attention_factor": settings.get("long_mscale" if is_long else "short_mscale")}
