"""GLM 4.7 Flash: DeepSeek-V3's layers in other sizes."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, fine_grained_experts, latent_attention, layer_kinds
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    defaults={
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rope_interleave": True,
    },
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
)
def glm4_moe_lite(build: Build) -> CausalLM:
    """GLM 4.7 Flash: latent attention, sigmoid routing with a correction bias and groups, shared experts; a list names
    the layers with experts. Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2412.19437, arXiv 2508.06471.
    """
    config = build.config
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    layers = config.size("num_hidden_layers")
    left_out = ["dense"] + ["sparse"] * (layers - 1)
    kinds = layer_kinds(config, ("dense", "sparse"), left_out, "mlp_layer_types")
    build.ignore(*(f"model.layers.{layers + k}.*" for k in range(config.count("num_nextn_predict_layers"))))
    attention = latent_attention(build, interleave=config.flag("rope_interleave"))
    return decoder_model(build, attention, fine_grained_experts(build, lambda i: kinds[i] == "sparse"))
