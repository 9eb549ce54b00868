"""Ministral of 2024."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "MinistralForCausalLM",
    model_type="ministral",
    defaults={"max_position_embeddings": 2**17, "num_key_value_heads": 8, "sliding_window": 4096},
)
def ministral(build: Build) -> CausalLM:
    """Ministral: Mistral whose layers may differ in whether they attend to a window.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Un Ministral, des Ministraux (Mistral AI, 2024).
    """
    attention = grouped_query_attention(build, windows=layer_windows(build.config, lambda i: True))
    return decoder_model(build, attention, dense_mlp(build))
