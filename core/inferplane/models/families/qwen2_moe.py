"""Qwen 1.5 and 2 with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    SharedExperts,
    decoder_model,
    grouped_query_attention,
    layer_windows,
    softmax_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "qkv_bias": True,
    },
)
def qwen2_moe(build: Build) -> CausalLM:
    """Qwen 2 MoE: biases on q, k and v; softmax routing over all experts in the sparse layers, and a shared expert
    that a gate weighs.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2407.10671.
    """
    config = build.config
    last = config.count("max_window_layers")
    windows = layer_windows(config, lambda i: i % 2 == 0 and i < last) if config.flag("use_sliding_window") else []
    shared = SharedExperts(config.size("shared_expert_intermediate_size"), "shared_expert", "shared_expert_gate")
    attention = grouped_query_attention(build, bias=config.flag("qkv_bias", True), windows=windows)
    return decoder_model(build, attention, softmax_experts(build, shared))
