"""Granite 4, hybrid: dense and with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.granite import DEFAULTS, granite_model
from inferplane.models.families.granitemoe import BLOCK, granite_experts
from inferplane.models.parts import LAYERS, layer_kinds, mamba2, mamba2_of_config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP

RECURRENT = ("mamba", "linear_attention")
KINDS = (*RECURRENT, "attention", "full_attention")
"""Names of kinds of layers, in both spellings."""


@architecture(
    "GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    defaults={
        **DEFAULTS, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    aliases={"layers_block_type": "layer_types"},
    expert_names=(BLOCK, "gate_proj", "up_proj", "down_proj"),
    is_fused=True,
)  # fmt: skip
def granite_moe_hybrid(build: Build) -> CausalLM:
    """Granite 4: Granite's factors; Mamba-2 in most layers, and attention, rotated or not, in the others; a shared MLP,
    beside experts if `num_local_experts` is above 0.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Mamba-2, arXiv 2405.21060; Granite 4.0 (transformers' GraniteMoeHybridConfig).
    """
    config = build.config
    config.refuse(hidden_act=("silu",))
    config.need("num_local_experts")
    kinds = layer_kinds(config, KINDS, ["mamba"] * config.size(LAYERS))
    mixer = mamba2(build, **mamba2_of_config(build))
    recurrences = {i: mixer(i, f"model.layers.{i}.mamba") for i, kind in enumerate(kinds) if kind in RECURRENT}
    shared = config.size("shared_intermediate_size")
    build.ignore(f"model.layers.*.{BLOCK}.shared_mlp.gate_up_proj.weight")  # its parts are read

    def mlp(i: int, name: str) -> GatedMLP:
        return build.mlp(f"model.layers.{i}.{BLOCK}.shared_mlp", shared, config.size("hidden_size"))

    feed_forward = granite_experts(build) if config.count("num_local_experts") else mlp
    rotates = config.get("position_embedding_type") == "rope"
    return granite_model(build, feed_forward, recurrences, rotates=rotates)
