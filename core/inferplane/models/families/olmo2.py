"""OLMo 2."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import HeadNorms, LayerForm, decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

AFTER = LayerForm((None, None), ("post_attention_layernorm", "post_feedforward_layernorm"))
"""Norms follow the blocks; OLMo 3 and EXAONE 4 have the same."""


@architecture(
    "Olmo2ForCausalLM",
    model_type="olmo2",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
)
def olmo2(build: Build) -> CausalLM:
    """OLMo 2: norms on what attention and MLP return, not on what they read; norms on q and k over all heads.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2501.00656.
    """
    bias = build.config.flag("attention_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=HeadNorms("width"))
    return decoder_model(build, attention, dense_mlp(build), AFTER)
