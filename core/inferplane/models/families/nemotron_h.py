"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    LayerForm,
    SharedExperts,
    decoder_model,
    fine_grained_experts,
    grouped_query_attention,
    mamba2,
    plain_mlp,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

KINDS = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba", "full_attention": "attention",
}  # fmt: skip
"""Other names of kinds of layers."""


@architecture(
    "NemotronHForCausalLM",
    model_type="nemotron_h",
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "relu2", "mlp_bias": False, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
        "use_bias": False, "time_step_min": 0.001, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    aliases={
        "layers_block_type": "layer_types", "layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act",
        "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
    },
)  # fmt: skip
def nemotron_h(build: Build) -> CausalLM:
    """Nemotron-H: layers of one block each, a Mamba-2 mixer, an MLP without a gate, experts of such MLPs, or attention
    without rotation.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2504.03624, arXiv 2512.20848.
    """
    config = build.config
    config.refuse(mamba_hidden_act=("silu",), attention_bias=(False,), moe_latent_size=())
    build.ignore("mtp.*")
    kinds = _kinds(config)
    build = replace(build, config=Config({**config, LAYERS: len(kinds)}, config.name))
    mixer = mamba2(
        build,
        heads=(config.size("n_groups"), config.size("mamba_num_heads")),
        dims=(config.size("mamba_head_dim"), config.size("ssm_state_size")),
        kernel=config.size("conv_kernel"),
        conv_bias=config.flag("use_conv_bias"),
        bias=config.flag("use_bias"),
        eps=config.number_from_zero("rms_norm_eps"),
        # transformers does not bound those of single tokens
        dt_limits=(config.number_from_zero("time_step_min"), math.inf),
    )
    attention, bias = grouped_query_attention(build, ropes=[None] * len(kinds)), config.flag("mlp_bias")
    blocks = dict[str, Any](mamba=mixer, attention=attention)
    blocks["mlp"] = plain_mlp(build, "relu2", bias=bias) if "mlp" in kinds else None
    if "moe" in kinds:
        shared = SharedExperts(config.size("moe_shared_expert_intermediate_size"), bias=bias)
        blocks["moe"] = fine_grained_experts(build, lambda i: True, shared=shared, act="relu2")

    def block(i: int, *here: str) -> Any:
        return blocks[kinds[i]](i, f"model.layers.{i}.mixer") if kinds[i] in here else None

    mix, feed_forward = lambda i, _: block(i, "mamba", "attention"), lambda i, _: block(i, "mlp", "moe")
    return decoder_model(build, mix, feed_forward, LayerForm(before=("norm", None)))


def _kinds(config: Config) -> list[str]:
    """The kind of each layer."""
    stated = config.get("layer_types") or config.get("hybrid_override_pattern")
    if not isinstance(stated, (list, str)) or not stated or not all(isinstance(kind, str) for kind in stated):
        raise CheckpointError(f"{config.name} lacks the kinds of its layers.", remedy="add 'layers_block_type'")
    for kind in stated:
        config.check("layer_types", KINDS.get(kind, kind), ("mamba", "attention", "mlp", "moe"))
    return [KINDS.get(kind, kind) for kind in stated]
