"""Llama 2, 3.x and the models built like them."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "LlamaForCausalLM",
    model_type="llama",
    defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
)
def llama(build: Build) -> CausalLM:
    """Llama: grouped-query attention, rotary positions, gated MLP.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2302.13971, arXiv 2407.21783.
    """
    # Older exports wrote these; the config implies them, and `check_frequencies` warns if it gives others.
    build.ignore("model.layers.*.self_attn.rotary_emb.inv_freq")
    bias, mlp_bias = build.config.flag("attention_bias"), build.config.flag("mlp_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias)
    return decoder_model(build, attention, dense_mlp(build, bias=mlp_bias))
