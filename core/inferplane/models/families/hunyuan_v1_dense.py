"""Hunyuan, dense."""

from __future__ import annotations

from collections.abc import Callable

from inferplane.models.build import Build
from inferplane.models.parts import (
    HeadNorms,
    decoder_model,
    dense_mlp,
    grouped_query_attention,
    head_size,
    rotate_all,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GQABlock


@architecture(
    "HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
)
def hunyuan_v1_dense(build: Build) -> CausalLM:
    """Hunyuan: norms on each head's q and k after the rotation, whose base a constant `alpha` may stretch.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Hunyuan-7B-Instruct (Tencent, 2025).
    """
    return decoder_model(build, hunyuan_attention(build), dense_mlp(build))


def hunyuan_attention(build: Build) -> Callable[[int, str], GQABlock]:
    """Return a function that builds a layer's attention from the layer's number and the attention's name."""
    config, bias = build.config, build.config.flag("attention_bias")
    dim, settings = head_size(config), config.rope
    if settings["rope_type"] == "dynamic" and settings.get("alpha"):
        settings = {
            "rope_type": "default",
            "rope_theta": settings["rope_theta"] * settings["alpha"] ** (dim / (dim - 2)),
        }
    return grouped_query_attention(
        build,
        bias=bias,
        out_bias=bias,
        norms=HeadNorms("each", ("query_layernorm", "key_layernorm"), last=True),
        ropes=rotate_all(build, rotation(build, dim, settings=settings)),
    )
