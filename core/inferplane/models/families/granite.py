"""Granite 3 and 4, dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inferplane.models.build import Build
from inferplane.models.parts import LAYERS, LayerForm, decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, RecurrentBlock

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


def granite_model(
    build: Build,
    mlp: Callable[[int, str], GatedMLP | MoE],
    recurrences: Mapping[int, RecurrentBlock] | None = None,
    *,
    rotates: bool = True,
) -> CausalLM:
    """Build the model around the layers' MLPs.

    Args:
        build: as of a family.
        mlp: builds a layer's MLP from the layer's number and the MLP's name.
        recurrences: the blocks of layers that do not attend, by the layer's number; None: all attend.
        rotates: whether q and k are rotated.
    """
    config, recurrences = build.config, recurrences or {}
    bias, scale = config.flag("attention_bias"), config.attention_factor("attention_multiplier")
    ropes = () if rotates else [None] * config.size(LAYERS)
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, scale=scale, ropes=ropes)
    return decoder_model(
        build,
        lambda i, name: recurrences[i] if i in recurrences else attention(i, name),
        mlp,
        LayerForm(factor=config.factor("residual_multiplier")),
        embed_factor=config.factor("embedding_multiplier"),
        logit_factor=1 / config.divisor("logits_scaling"),
    )
