"""Qwen3-VL, text, with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen3_vl import DEFAULTS
from inferplane.models.parts import decoder_model, grouped_query_attention, softmax_experts
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    defaults={**DEFAULTS, "num_key_value_heads": 16, "decoder_sparse_step": 1, "num_experts_per_tok": 4},
    aliases={"num_local_experts": "num_experts"},
    stacks_experts="any_order",
)
def qwen3_vl_moe(build: Build) -> CausalLM:
    """Qwen3-VL MoE: the text part is Qwen 3 MoE, whose experts' weights are always divided by their sum. A layer's
    experts are stored as one tensor.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2511.21631.
    """
    bias = build.config.flag("attention_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=True)
    return decoder_model(build, attention, softmax_experts(build, renormalize=True, stacked=True))
