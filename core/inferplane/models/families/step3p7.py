"""Step 3.7, text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    HeadNorms,
    LayerForm,
    SharedExperts,
    decoder_model,
    dense_mlp,
    fine_grained_experts,
    grouped_query_attention,
    head_size,
    layer_kinds,
    limit_gates,
    list_layers,
    rotation,
    with_head_gates,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE

NEAR, FAR = "sliding_attention", "full_attention"
LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
"""Entries with a value a layer, behind which published configs have those of layers for multi-token prediction."""


@architecture(
    "Step3p7ForConditionalGeneration",
    model_type="step3p5",
    defaults={
        "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": False, "mlp_bias": False, "share_expert_dim": 1280, "moe_router_scaling_factor": 1.0,
    },
    aliases={
        **dict.fromkeys(("num_local_experts", "moe_num_experts"), "n_routed_experts"),
        "num_attention_groups": "num_key_value_heads", "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim", "num_mtp_layers": "num_nextn_predict_layers",
    },
    renames={
        r"\.moe\.gate\.": ".mlp.gate.", r"\.moe\.router_bias$": ".mlp.gate.e_score_correction_bias",
        r"\.moe\.(gate|up|down)_proj\.": r".mlp.experts.\1_proj.", r"\.share_expert\.": ".mlp.shared_experts.",
    },
)  # fmt: skip
def step3p7(build: Build) -> CausalLM:
    """Step 3.7: a gate for each head of attention; windows in some layers, with a number of heads and rotary settings
    of their own; sigmoid routing with a correction bias beside a shared expert; limits behind the activation in some
    layers. Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints, or as
            transformers names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: transformers' Step3p7TextConfig (StepFun, 2026).
    """
    config, dim = _settle(build.config), head_size(build.config)
    build = replace(build, config=config)
    config.refuse(use_head_wise_attn_gate=(True,), moe_router_activation=("sigmoid",))
    layers, bias, mlp_bias = config.size(LAYERS), config.flag("attention_bias"), config.flag("mlp_bias")
    build.ignore(*(f"model.layers.{layers + k}.*" for k in range(config.count("num_nextn_predict_layers"))))
    kinds = layer_kinds(config, (NEAR, FAR), [FAR] * layers)
    blocks = layer_kinds(config, ("dense", "sparse"), [], "mlp_layer_types")
    scale = config.number("query_pre_attn_scalar", dim) ** -0.5
    heads = {FAR: config.size("num_attention_heads")}
    heads[NEAR] = config.size("num_sliding_attention_heads", heads[FAR])

    def attend(kind: str) -> Any:
        own = replace(build, config=Config({**config, "num_attention_heads": heads[kind]}, config.name))
        rope = rotation(build, dim, partial=True, settings=_rotary(config, kind, kinds.index(kind)))
        form: dict[str, Any] = {"windows": [config.size("sliding_window")] * layers if kind == NEAR else []}
        form |= {"ropes": [rope] * layers, "norms": HeadNorms(offset=True), "scale": scale}
        return with_head_gates(own, grouped_query_attention(own, bias=bias, out_bias=bias, **form))

    attention = {kind: attend(kind) for kind in set(kinds)}
    limits, shared_limits = (config.numbers(entry, layers, 0.0) for entry in LISTS[2:])
    shared = SharedExperts(config.size("share_expert_dim"), bias=mlp_bias)
    dense, sparse = dense_mlp(build, bias=mlp_bias), fine_grained_experts(build, lambda i: True, shared=shared)

    def mlp(i: int, name: str) -> GatedMLP | MoE:
        return limit_gates((dense if blocks[i] == "dense" else sparse)(i, name), shared_limits[i], limits[i])

    mix = lambda i, name: attention[kinds[i]](i, name)  # noqa: E731
    return decoder_model(build, mix, mlp, LayerForm(norm=Build.offset_rms_norm))


def _settle(config: Config) -> Config:
    """The config in transformers' form, with the entries of layers of the model alone."""
    layers, found = config.size(LAYERS), {**config, "norm_topk_prob": True}
    found["routed_scaling_factor"] = config.factor("moe_router_scaling_factor")
    if config.get("mlp_layer_types") is None:
        listed = config.get(entry := "moe_layers_enum")
        numbers = listed.split(",") if isinstance(listed, str) else list_layers(config, entry, range(3, layers))
        sparse = {str(number).strip() for number in numbers}
        found["mlp_layer_types"] = ["sparse" if str(i) in sparse else "dense" for i in range(layers)]
    for entry in LISTS:
        if isinstance(found.get(entry), list):
            found[entry] = [0.0 if value is None else value for value in found[entry][:layers]]
    other = config.get("attention_other_setting")
    if config.get("num_sliding_attention_heads") is None and isinstance(other, Mapping):
        found["num_sliding_attention_heads"] = other.get("num_attention_heads")
    return Config(found, config.name)


def _rotary(config: Config, kind: str, i: int) -> dict[str, Any]:
    """The rotary settings of a kind of layer, of which layer `i` is one: published configs state bases and shares by
    layer, and a scaling for full attention."""
    settings = config.rotary(kind=kind)
    if config.has_rotary_kinds:
        return settings
    settings = settings if kind == FAR else {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    by_layer = {"rope_theta": settings["rope_theta"], "partial_rotary_factor": config.get("partial_rotary_factors")}
    for entry, values in by_layer.items():
        if isinstance(values, list):
            settings[entry] = values[i] if i < len(values) else None  # which is refused
    return settings
