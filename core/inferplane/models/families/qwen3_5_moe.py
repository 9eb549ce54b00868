"""Qwen 3.5, text, with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen3_next import DEFAULTS, delta_net_model, experts_beside_one
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text", defaults={**DEFAULTS, "norm_topk_prob": True})
def qwen3_5_moe(build: Build) -> CausalLM:
    """Qwen 3.5 MoE: Qwen3-Next with a projection for each of the inputs of its delta nets.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Gated DeltaNet, arXiv 2412.06464; gated attention, arXiv 2505.06708.
    """
    build.config.refuse(norm_topk_prob=(True,))
    return delta_net_model(build, experts_beside_one(build), grouped=False)
