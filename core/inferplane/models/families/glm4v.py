"""GLM-4.1V, text, dense."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.glm4 import glm4
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Glm4vForConditionalGeneration",
    model_type="glm4v_text",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    },
    is_fused=True,
)
def glm4v(build: Build) -> CausalLM:
    """GLM-4.1V: the text part is GLM-4-0414. Tokens of text have one position, so rotary settings by axis of an image
    have no effect.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2507.01006.
    """
    build.config.refuse(attention_bias=(True,))
    return glm4(build)
