"""Arcee's AFM."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, grouped_query_attention, plain_mlp
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "ArceeForCausalLM",
    model_type="arcee",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
    },
)
def arcee(build: Build) -> CausalLM:
    """AFM: Llama with an MLP without a gate, its activation the squared ReLU.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: AFM-4.5B (Arcee AI, 2025).
    """
    config, bias = build.config, build.config.flag("attention_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias)
    return decoder_model(build, attention, plain_mlp(build, "relu2", bias=config.flag("mlp_bias")))
