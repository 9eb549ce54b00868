"""Qwen 3 with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen2 import WINDOWS
from inferplane.models.parts import decoder_model, grouped_query_attention, sliding_window, softmax_experts
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        **WINDOWS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
)
def qwen3_moe(build: Build) -> CausalLM:
    """Qwen 3 MoE: norms on each head's q and k; softmax routing over all experts in the sparse layers.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2505.09388.
    """
    config = build.config
    bias = config.flag("attention_bias")
    windows = sliding_window(config) if config.flag("use_sliding_window") else []
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=True, windows=windows)
    return decoder_model(build, attention, softmax_experts(build))
