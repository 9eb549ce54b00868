"""Qwen2.5-VL, text."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen2 import qwen2
from inferplane.models.families.qwen2_vl import DEFAULTS
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl_text", defaults=DEFAULTS, other_types=("qwen2_5_vl",)
)
def qwen2_5_vl(build: Build) -> CausalLM:
    """Qwen2.5-VL: the text part is Qwen 2. Tokens of text have one position, so rotary settings by axis of an image
    have no effect.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2502.13923.
    """
    return qwen2(build)
