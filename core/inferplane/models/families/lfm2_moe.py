"""LFM2 with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.families.lfm2 import lfm2_mlp, lfm2_model
from inferplane.models.parts import experts_per_token, mixture_of_experts
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute
from inferplane.types import Weight

PARTS = ("w1", "w3", "w2")
SUM_EPS = 1e-6
"""Of transformers' Lfm2MoeTopKRouter; configs have no entry for it."""


@architecture(
    "Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    defaults={
        "num_key_value_heads": 8, "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3,
        "num_dense_layers": 2, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        "num_experts_per_tok": 4,
    },
    aliases={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    expert_names=("feed_forward", *PARTS),
)  # fmt: skip
def lfm2_moe(build: Build) -> CausalLM:
    """LFM2 MoE: LFM2 with sigmoid routing in all but the first layers, where experts are chosen with a bias.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: the LFM2 technical report, arXiv 2511.23404.
    """
    config, count = build.config, "num_experts"
    dense, inner = config.count("num_dense_layers"), config.size("intermediate_size")
    chosen, renormalize = experts_per_token(config, count), config.flag("norm_topk_prob")
    factor = config.factor("routed_scaling_factor")
    route = MoERoute(None, chosen, "sigmoid", renormalize=renormalize, factor=factor, sum_eps=SUM_EPS)

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < dense:
            return lfm2_mlp(build, name, inner)
        bias = Weight((f"{name}.expert_bias",), (config.size(count),), torch.float32)
        by_bias = replace(route, bias=bias if config.flag("use_expert_bias") else None)
        return mixture_of_experts(build, name, by_bias, count=count, parts=PARTS)

    return lfm2_model(build, feed_forward)
