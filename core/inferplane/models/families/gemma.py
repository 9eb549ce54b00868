"""Gemma, first generation."""

from __future__ import annotations

from dataclasses import replace

from inferplane.models.build import Build
from inferplane.models.parts import LayerForm, decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "GemmaForCausalLM",
    model_type="gemma",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
)
def gemma(build: Build) -> CausalLM:
    """Gemma: norms whose weights are stored without their 1, GELU in the gate, an embedding times the root of its
    width.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2403.08295.
    """
    if build.config.get("hidden_act") == "gelu":  # as the first exports call the approximation by tanh
        build = replace(build, config=Config({**build.config, "hidden_act": "gelu_pytorch_tanh"}, build.config.name))
    config, bias = build.config, build.config.flag("attention_bias")
    config.refuse(use_bidirectional_attention=(False,))
    attention = grouped_query_attention(build, bias=bias, out_bias=bias)
    form = LayerForm(norm=Build.offset_rms_norm)
    return decoder_model(
        build, attention, dense_mlp(build, act="gelu_tanh"), form, embed_factor=config.size("hidden_size") ** 0.5
    )
