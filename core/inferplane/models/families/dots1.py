"""dots.llm1: Qwen 3's attention with DeepSeek-V3's mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, fine_grained_experts, grouped_query_attention, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Dots1ForCausalLM",
    model_type="dots1",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    aliases={"num_local_experts": "n_routed_experts"},
)
def dots1(build: Build) -> CausalLM:
    """dots.llm1: norms on each head's q and k; sigmoid routing with a correction bias and groups, shared experts, first
    dense layers; some layers may attend to a window.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2506.05767.
    """
    config = build.config
    config.refuse(scoring_func=("noaux_tc", "sigmoid"), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    bias, first = config.flag("attention_bias"), config.count("max_window_layers")
    windows = layer_windows(config, lambda i: i >= first)
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=True, windows=windows)
    return decoder_model(build, attention, fine_grained_experts(build))
