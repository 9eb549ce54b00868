"""GLM-4.5V and 4.6V, text, with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.glm4_moe import ALIASES, DEFAULTS, glm4_moe
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Glm4vMoeForConditionalGeneration",
    model_type="glm4v_moe_text",
    defaults={**DEFAULTS, "max_position_embeddings": 65536, "attention_bias": True, "num_experts_per_tok": 8},
    aliases=ALIASES,
)
def glm4v_moe(build: Build) -> CausalLM:
    """GLM-4.5V: the text part is GLM 4.5 without norms on q and k. Tokens of text have one position, so rotary settings
    by axis of an image have no effect.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2507.01006.
    """
    build.config.refuse(use_qk_norm=(False,))
    return glm4_moe(build)
