"""Qwen 1.5 and 2 with mixtures of experts."""

from __future__ import annotations

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import (
    SharedExperts,
    decoder_model,
    dense_mlp,
    experts_per_token,
    grouped_query_attention,
    layer_windows,
    mixture_of_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute


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
    last, step, count = config.count("max_window_layers"), config.size("decoder_sparse_step"), "num_experts"
    windows = layer_windows(config, lambda i: i % 2 == 0 and i < last) if config.flag("use_sliding_window") else []
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise CheckpointError(
            f"{config.name}: mlp_only_layers is {plain!r}, not a list.", remedy="fetch the file again"
        )
    chosen = experts_per_token(config, count)
    route = MoERoute(None, chosen, "softmax", renormalize=config.flag("norm_topk_prob"))
    size, mlp = config.size("shared_expert_intermediate_size"), dense_mlp(build)
    shared = SharedExperts(size, "shared_expert", "shared_expert_gate")

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i in plain or (i + 1) % step:
            return mlp(i, name)
        return mixture_of_experts(build, name, route, count=count, shared=shared)

    attention = grouped_query_attention(build, bias=config.flag("qkv_bias", True), windows=windows)
    return decoder_model(build, attention, feed_forward)
