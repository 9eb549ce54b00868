"""Qwen 3.5, text, dense."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen3_next import DEFAULTS, delta_net_model
from inferplane.models.parts import dense_mlp
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("Qwen3_5ForCausalLM", model_type="qwen3_5_text", defaults={**DEFAULTS, "num_key_value_heads": 4})
def qwen3_5(build: Build) -> CausalLM:
    """Qwen 3.5: Qwen3-Next with an MLP in place of experts. Tokens of text have one position, so rotary settings by
    axis of an image have no effect.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Gated DeltaNet, arXiv 2412.06464; gated attention, arXiv 2505.06708.
    """
    return delta_net_model(build, dense_mlp(build), grouped=False)
