"""Qwen 3 with mixtures of experts."""

from __future__ import annotations

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.families.qwen2 import WINDOWS
from inferplane.models.parts import (
    decoder_model,
    dense_mlp,
    experts_per_token,
    grouped_query_attention,
    mixture_of_experts,
    sliding_window,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute


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
    bias, step = config.flag("attention_bias"), config.size("decoder_sparse_step")
    windows = sliding_window(config) if config.flag("use_sliding_window") else []
    count = "num_experts"
    chosen = experts_per_token(config, count)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise CheckpointError(
            f"{config.name}: mlp_only_layers is {plain!r}, not a list.", remedy="fetch the file again"
        )
    route = MoERoute(None, chosen, "softmax", renormalize=config.flag("norm_topk_prob"))
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=True, windows=windows)
    mlp = dense_mlp(build)

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        sparse = i not in plain and (i + 1) % step == 0
        return mixture_of_experts(build, name, route, count=count) if sparse else mlp(i, name)

    return decoder_model(build, attention, feed_forward)
