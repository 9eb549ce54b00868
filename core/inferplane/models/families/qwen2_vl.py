"""Qwen2-VL, text."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen2 import WINDOWS, qwen2
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

DEFAULTS = {
    **WINDOWS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""Of entries that a config leaves out; Qwen2.5-VL has the same."""


@architecture(
    "Qwen2VLForConditionalGeneration", model_type="qwen2_vl_text", defaults=DEFAULTS, other_types=("qwen2_vl",)
)
def qwen2_vl(build: Build) -> CausalLM:
    """Qwen2-VL: the text part is Qwen 2. Tokens of text have one position, so rotary settings by axis of an image have
    no effect.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2409.12191.
    """
    return qwen2(build)
