"""Granite 3 and 4, dense."""

from __future__ import annotations

from collections.abc import Callable

from inferplane.models.build import Build
from inferplane.models.parts import LayerForm, decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE

DEFAULTS = {
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


@architecture("GraniteForCausalLM", model_type="granite", defaults={**DEFAULTS, "mlp_bias": False})
def granite(build: Build) -> CausalLM:
    """Granite: Llama with factors on embedding, attention scores, what each block adds, and logits.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Granite 3.0 technical report (IBM, 2024).
    """
    return granite_model(build, dense_mlp(build, bias=build.config.flag("mlp_bias")))


def granite_model(build: Build, mlp: Callable[[int, str], GatedMLP | MoE]) -> CausalLM:
    """Build the model around the layers' MLPs, from a function of a layer's number and its MLP's name."""
    config = build.config
    bias = config.flag("attention_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, scale=config.number("attention_multiplier"))
    return decoder_model(
        build,
        attention,
        mlp,
        LayerForm(factor=config.number("residual_multiplier")),
        embed_factor=config.number("embedding_multiplier"),
        logit_factor=1 / config.number("logits_scaling"),
    )
