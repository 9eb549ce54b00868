"""DeepSeek-V3 and R1, Kimi K2, Moonlight: latent attention, fine-grained experts, multi-token prediction."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, fine_grained_experts, latent_attention, with_prediction_layers
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    defaults={
        "max_position_embeddings": 4096, "attention_bias": False, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "rope_interleave": True,
    },
    aliases={n: "n_routed_experts" for n in ("num_experts", "num_local_experts")}
    | {"num_mtp_layers": "num_nextn_predict_layers"},
    other_types=("kimi_k2",),
)  # fmt: skip
def deepseek_v3(build: Build) -> CausalLM:
    """DeepSeek-V3: MLA with and without a low-rank query, sigmoid routing with a correction bias and groups, shared
    experts, first dense layers, YaRN; with `build.mtp` also its multi-token-prediction layers.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints; FP8 blocks are
            accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2412.19437; latent attention: arXiv 2405.04434.
    """
    config = build.config
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    attention = latent_attention(build, interleave=config.flag("rope_interleave"))
    feed_forward = fine_grained_experts(build)
    return with_prediction_layers(build, decoder_model(build, attention, feed_forward), attention, feed_forward)
