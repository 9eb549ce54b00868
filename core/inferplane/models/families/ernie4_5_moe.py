"""ERNIE 4.5 with mixtures of experts, text."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    SharedExperts,
    decoder_model,
    dense_mlp,
    experts_per_token,
    grouped_query_attention,
    mixture_of_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute
from inferplane.types import Weight


@architecture(
    "Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
def ernie4_5_moe(build: Build) -> CausalLM:
    """ERNIE 4.5 MoE: rotation of adjacent entries; softmax routing with a correction bias, shared experts, some dense
    layers. Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: ERNIE 4.5 technical report (Baidu, 2025).
    """
    config = build.config
    config.refuse(use_bias=(False,), moe_gate_act=("softmax",))
    build.ignore("model.mtp_*")
    count = "moe_num_experts"
    total, layers = config.size(count), config.size("num_hidden_layers")
    chosen = experts_per_token(config, count, entry_of_chosen="moe_k")
    route = MoERoute(None, chosen, "softmax", least_sum=config.number_from_zero("moe_norm_min"))
    shared = SharedExperts(config.count("moe_num_shared_experts") * config.size("moe_intermediate_size"))
    first, step, last = config.count("moe_layer_start_index"), config.size("moe_layer_interval"), layers - 1
    if config["moe_layer_end_index"] != -1:
        last = config.count("moe_layer_end_index")
    mlp = dense_mlp(build)

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if (i + 1) % step or not first <= i <= last:
            return mlp(i, name)
        bias = Weight((f"{name}.moe_statics.e_score_correction_bias",), (total,), torch.float32)
        return mixture_of_experts(build, name, replace(route, bias=bias), count=count, shared=shared)

    return decoder_model(build, grouped_query_attention(build, interleaved=True), feed_forward)
