"""SmolLM 3."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    dense_mlp,
    find_rotated_layers,
    grouped_query_attention,
    head_size,
    layer_windows,
    rotate_some,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
)
def smollm3(build: Build) -> CausalLM:
    """SmolLM 3: Llama without rotation in every fourth layer, or in those that `no_rope_layers` marks with 0.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: SmolLM3 (Hugging Face, 2025); arXiv 2501.18795.
    """
    config = build.config
    bias, rotated = config.flag("attention_bias"), find_rotated_layers(config)
    windows = layer_windows(config, lambda i: not rotated[i]) if config.flag("use_sliding_window") else []
    ropes = rotate_some(rotation(build, head_size(config)), rotated)
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=windows, ropes=ropes)
    return decoder_model(build, attention, dense_mlp(build, bias=config.flag("mlp_bias")))
