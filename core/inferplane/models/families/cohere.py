"""Command R and R+."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import HeadNorms, LayerForm, decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

PARALLEL = LayerForm(("input_layernorm", None), parallel=True, norm=Build.layer_norm)
"""Attention and MLP read one layer norm; Command A has the same."""


@architecture(
    "CohereForCausalLM",
    model_type="cohere",
    defaults={
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "attention_bias": False,
        "use_qk_norm": False,
    },
)
def cohere(build: Build) -> CausalLM:
    """Command R: attention and MLP side by side behind one layer norm, rotation of adjacent entries, scaled logits.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Command R (Cohere, 2024).
    """
    config, bias = build.config, build.config.flag("attention_bias")
    norms = HeadNorms("by_head" if config.flag("use_qk_norm") else "none")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=norms, interleaved=True)
    return decoder_model(build, attention, dense_mlp(build), PARALLEL, logit_factor=config.factor("logit_scale"))
