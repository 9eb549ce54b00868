"""DeepSeek-V3 and R1, Kimi K2, Moonlight: latent attention, fine-grained experts, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

from inferplane.models.build import Build
from inferplane.models.parts import decoder_layer, decoder_model, fine_grained_experts, latent_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, LMHead, MTPLayer


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
    width, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    attention = latent_attention(build, interleave=config.flag("rope_interleave"))
    feed_forward = fine_grained_experts(build)
    model = decoder_model(build, attention, feed_forward)

    def mtp(i: int) -> MTPLayer:
        prefix = f"model.layers.{i}"
        return MTPLayer(
            embed=model.embed,  # published checkpoints repeat the embedding and the head; they are the main model's own
            enorm=build.rms_norm(f"{prefix}.enorm", width),
            hnorm=build.rms_norm(f"{prefix}.hnorm", width),
            eh_proj=build.linear(f"{prefix}.eh_proj", rows=width, columns=2 * width),
            layer=decoder_layer(build, i, attention(i, f"{prefix}.self_attn"), feed_forward(i, f"{prefix}.mlp")),
            norm=build.add_rms_norm(f"{prefix}.shared_head.norm", width),
            head=LMHead(model.head.weight),
            gather=build.gather(),
        )

    extra = config.count("num_nextn_predict_layers")
    for k in range(extra):
        unread = ("embed_tokens.weight", "shared_head.head.weight") if build.mtp else ("*",)
        build.ignore(*(f"model.layers.{layers + k}.{name}" for name in unread))
    return replace(model, mtp=tuple(mtp(layers + k) for k in range(extra))) if build.mtp else model
