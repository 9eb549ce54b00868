"""GLM 4.5, 4.6 and 4.7."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    fine_grained_experts,
    grouped_query_attention,
    head_size,
    rotate_all,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
"""Of entries that a config leaves out; GLM-4.5V has most of them."""
ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}


@architecture("Glm4MoeForCausalLM", model_type="glm4_moe", defaults=DEFAULTS, aliases=ALIASES)
def glm4_moe(build: Build) -> CausalLM:
    """GLM 4.5: a share of each head is rotated, q and k may have norms; DeepSeek-V3's routing, shared experts, first
    dense layers. Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2508.06471.
    """
    config = build.config
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    layers = config.size("num_hidden_layers")
    build.ignore(*(f"model.layers.{layers + k}.*" for k in range(config.count("num_nextn_predict_layers"))))
    bias, norms = config.flag("attention_bias"), config.flag("use_qk_norm")
    ropes = rotate_all(build, rotation(build, head_size(config), partial=True))
    attention = grouped_query_attention(build, bias=bias, norms=norms, ropes=ropes)
    return decoder_model(build, attention, fine_grained_experts(build))
