"""FlexOlmo: OLMoE's blocks in OLMo 2's form of layers."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.olmo2 import AFTER
from inferplane.models.families.olmoe import olmo_mixture
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "FlexOlmoForCausalLM",
    model_type="flex_olmo",
    defaults={
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
)
def flex_olmo(build: Build) -> CausalLM:
    """FlexOlmo: OLMoE with norms after each block instead of before.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2507.07024.
    """
    return olmo_mixture(build, AFTER)
