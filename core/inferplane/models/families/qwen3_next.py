"""Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    LayerForm,
    SharedExperts,
    attention_with_gates,
    decoder_model,
    gated_delta_net,
    layer_kinds,
    softmax_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "full_attention_interval": 4,
}


@architecture(
    "Qwen3NextForCausalLM",
    model_type="qwen3_next",
    defaults={**DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
)
def qwen3_next(build: Build) -> CausalLM:
    """Qwen3-Next: gated delta nets in three layers of four, attention with gates on its heads in the others; softmax
    routing over all experts, and a shared expert that a gate weighs. Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Gated DeltaNet, arXiv 2412.06464; gated attention, arXiv 2505.06708.
    """
    return delta_net_model(build, experts_beside_one(build), grouped=True)


def experts_beside_one(build: Build) -> Callable[[int, str], GatedMLP | MoE]:
    """Return a function that builds a layer's experts beside a shared one, which a gate weighs."""
    size = build.config.size("shared_expert_intermediate_size")
    return softmax_experts(build, SharedExperts(size, "shared_expert", "shared_expert_gate"))


def delta_net_model(build: Build, mlp: Callable[[int, str], Any], *, grouped: bool) -> CausalLM:
    """Build the model around the layers' MLPs, from a function of a layer's number and its MLP's name. Layers for
    multi-token prediction are not read.

    Args:
        build: as of a family.
        mlp: builds a layer's MLP.
        grouped: see `gated_delta_net`.
    """
    config = build.config
    build.ignore("mtp.*")
    every = config.size("full_attention_interval")
    left_out = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config.size(LAYERS))]
    kinds = layer_kinds(config, ("linear_attention", "full_attention"), left_out)
    attention, recurrence = attention_with_gates(build), gated_delta_net(build, grouped=grouped)

    def mix(i: int, name: str) -> Any:
        return attention(i, name) if kinds[i] == "full_attention" else recurrence(i, f"model.layers.{i}.linear_attn")

    return decoder_model(build, mix, mlp, LayerForm(norm=Build.offset_rms_norm))
