"""Llama 4, text."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    SharedExperts,
    decoder_model,
    experts_per_token,
    find_rotated_layers,
    grouped_query_attention,
    head_size,
    layer_kinds,
    list_layers,
    mixture_of_experts,
    name_parts,
    rotate_some,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, GQABlock, MoE, MoERoute, PrepareAttention, RMSNorm
from inferplane.types import Weight

COUNT, INNER, KINDS = "num_local_experts", "intermediate_size", ("chunked_attention", "full_attention")


@architecture(
    "Llama4ForCausalLM",
    model_type="llama4_text",
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
    },
    expert_names=("feed_forward", "gate_proj", "up_proj", "down_proj"),
    stacks_experts="inputs_first",
)  # fmt: skip
def llama4(build: Build) -> CausalLM:
    """Llama 4: attention within chunks and norms without weights on rotated q and k, but every fourth layer attends to
    all tokens without rotation; experts whose inputs a sigmoid scales, and a shared expert, in some layers or all.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Llama 4 (Meta, 2025); factors by position: arXiv 2501.19399.
    """
    config, positions = build.config, build.positions
    layers, dim, bias = config.size(LAYERS), head_size(config), config.flag("attention_bias")
    rotated, chunk = find_rotated_layers(config, takes_empty=True), config.size("attention_chunk_size")
    kinds = layer_kinds(config, KINDS, [KINDS[0] if yes else KINDS[1] for yes in rotated])
    scale, floor = config.factor("attn_scale"), config.number("floor_scale")

    def make_factors() -> torch.Tensor:
        return torch.log1p(torch.floor((torch.arange(positions) + 1.0) / floor)) * scale + 1.0

    windows = [chunk if kind == KINDS[0] else None for kind in kinds]
    ropes = rotate_some(rotation(build, dim, interleaved=True), rotated)
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=windows, ropes=ropes)
    norm = RMSNorm(Weight((), (dim,), make=lambda: torch.ones(dim)), config.number_from_zero("rms_norm_eps"))
    factors = Weight((), (positions,), torch.float32, make=make_factors)

    def attend(i: int, name: str) -> GQABlock:
        block = attention(i, name)
        if windows[i]:
            block = replace(block, few=replace(block.few, chunk=chunk), many=replace(block.many, chunk=chunk))
        if rotated[i] and config.flag("use_qk_norm"):
            rope = block.enter.rope
            return replace(block, enter=PrepareAttention(block.enter.write, rope, norm, norm, norms_last=True))
        if not rotated[i] and config.get("attn_temperature_tuning"):
            return replace(block, enter=PrepareAttention(block.enter.write, q_factors=factors))
        return block

    step = config.size("interleave_moe_layer_step")
    sparse = list_layers(config, "moe_layers", range(step - 1, layers, step))
    route = MoERoute(None, experts_per_token(config, COUNT), "sigmoid", renormalize=False)
    shared, parts = SharedExperts(config.size(INNER), "shared_expert"), name_parts(build)

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        name = f"model.layers.{i}.feed_forward"
        if i not in sparse:
            return build.mlp(name, config.size(f"{INNER}_mlp"), config.size("hidden_size"), f"{INNER}_mlp")
        mixture = mixture_of_experts(
            build, name, route, count=COUNT, inner=INNER, shared=shared, parts=parts, router="router"
        )
        return replace(mixture, scales_inputs=True)

    return decoder_model(build, attend, feed_forward)
