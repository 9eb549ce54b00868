"""DeepSeek-V3.2: DeepSeek-V3 whose attention reads the tokens that a lightning indexer chooses."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    fine_grained_experts,
    layer_kinds,
    sparse_latent_attention,
    with_prediction_layers,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    defaults={
        "max_position_embeddings": 163840, "attention_bias": False, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
    },
    aliases={n: "n_routed_experts" for n in ("num_experts", "num_local_experts")},
)  # fmt: skip
def deepseek_v32(build: Build) -> CausalLM:
    """DeepSeek-V3.2: sparse latent attention with an indexer in each layer, sigmoid routing with a correction bias and
    groups, shared experts, first dense layers, YaRN; with `build.mtp` also its multi-token-prediction layers.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints; FP8 blocks are
            accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2512.02556; arXiv 2412.19437.
    """
    config = build.config
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    layers, dense = config.size("num_hidden_layers"), config.count("first_k_dense_replace")
    left_out = ["dense" if i < dense else "sparse" for i in range(layers)]
    kinds = layer_kinds(config, ("dense", "sparse"), left_out, "mlp_layer_types")
    attention = sparse_latent_attention(build, interleave_index=False)
    feed_forward = fine_grained_experts(build, lambda i: i >= layers or kinds[i] == "sparse")
    return with_prediction_layers(build, decoder_model(build, attention, feed_forward), attention, feed_forward)
