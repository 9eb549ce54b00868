"""Qwen3-VL, text, dense."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen3 import qwen3
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 5e5, "attention_bias": False}
"""Of entries that a config leaves out; with mixtures of experts they are the same."""


@architecture(
    "Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl_text",
    defaults={**DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
)
def qwen3_vl(build: Build) -> CausalLM:
    """Qwen3-VL: the text part is Qwen 3. Tokens of text have one position, so rotary settings by axis of an image have
    no effect.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2511.21631.
    """
    return qwen3(build)
