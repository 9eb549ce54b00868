"""Mistral 7B and the dense models built like it."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention, sliding_window
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "MistralForCausalLM",
    model_type="mistral",
    defaults={"max_position_embeddings": 2**17, "num_key_value_heads": 8, "sliding_window": 4096},
)
def mistral(build: Build) -> CausalLM:
    """Mistral: Llama whose layers all attend to a window, where the config states one.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2310.06825.
    """
    build.config.refuse(layer_types=())
    attention = grouped_query_attention(build, windows=sliding_window(build.config))
    return decoder_model(build, attention, dense_mlp(build))
