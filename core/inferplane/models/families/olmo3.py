"""OLMo 3."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.olmo2 import AFTER
from inferplane.models.parts import (
    HeadNorms,
    decoder_model,
    dense_mlp,
    grouped_query_attention,
    head_size,
    layer_windows,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    },
)
def olmo3(build: Build) -> CausalLM:
    """OLMo 3: OLMo 2 with windows in three of four layers, whose positions are not scaled.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: OLMo 3 technical report (Ai2, 2025).
    """
    config = build.config
    bias, windows = config.flag("attention_bias"), layer_windows(config, lambda i: (i + 1) % 4 != 0)
    dim = head_size(config)
    full = rotation(build, dim, settings=config.rotary(kind="full_attention"))
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    near = rotation(build, dim, settings=config.rotary(kind="sliding_attention") if config.has_rotary_kinds else plain)
    ropes = [near if window else full for window in windows or [None] * config.size("num_hidden_layers")]
    attention = grouped_query_attention(
        build, bias=bias, out_bias=bias, norms=HeadNorms("width"), windows=windows, ropes=ropes
    )
    return decoder_model(build, attention, dense_mlp(build), AFTER)
