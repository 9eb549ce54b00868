"""ERNIE 4.5, dense."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
)
def ernie4_5(build: Build) -> CausalLM:
    """ERNIE 4.5: Llama with rotation of adjacent entries, and one flag for all biases.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: ERNIE 4.5 technical report (Baidu, 2025).
    """
    bias = build.config.flag("use_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, interleaved=True)
    return decoder_model(build, attention, dense_mlp(build, bias=bias))
