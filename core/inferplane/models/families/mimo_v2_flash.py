"""MiMo V2 Flash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    SharedExperts,
    attention_with_values,
    decoder_model,
    fine_grained_experts,
    grouped_query_attention,
    head_size,
    layer_kinds,
    list_layers,
    rotate_all,
    rotation,
    with_sinks,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GQABlock

SHARE = 0.334
"""Of each head that is rotated, where a config does not say it."""
NEAR, FAR = "sliding_attention", "full_attention"


@architecture(
    "MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    defaults={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "attention_bias": False,
        "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 5e6,
    },
    aliases={"num_local_experts": "n_routed_experts", "layernorm_epsilon": "rms_norm_eps"},
    renames={r"\.self_attn\.attention_sink_bias": ".self_attn.sinks"},
)  # fmt: skip
def mimo_v2_flash(build: Build) -> CausalLM:
    """MiMo V2 Flash: five layers of six attend to a window, with twice the KV heads, a sink a head and a rotary base of
    their own; values are narrower than keys; a share of each head is rotated; sigmoid routing with a correction bias.
    Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints, or as
            transformers names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2601.02780.
    """
    config = build.config
    heads, kv_heads, dim = config.size("num_attention_heads"), config.size("num_key_value_heads"), head_size(config)
    v_dim, bias = config.size("v_head_dim"), config.flag("attention_bias")
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",), n_shared_experts=(0,))
    config.refuse(swa_num_attention_heads=(heads,), swa_head_dim=(dim,), swa_v_head_dim=(v_dim,))
    config.refuse(add_swa_attention_sink_bias=(True,), add_full_attention_sink_bias=(False,))
    build.ignore("model.mtp.*")
    layers = config.size(LAYERS)
    left_out = [FAR if i == 0 or (i + 1) % 6 == 0 else NEAR for i in range(layers)]
    kinds = layer_kinds(config, (NEAR, FAR), _read_pattern(config, "hybrid_layer_pattern", (FAR, NEAR), left_out))
    left_out = ["dense"] + ["sparse"] * (layers - 1)
    left_out = _read_pattern(config, "moe_layer_freq", ("dense", "sparse"), left_out)
    blocks = layer_kinds(config, ("dense", "sparse"), left_out, "mlp_layer_types")
    before = config.count("sliding_window_size")
    windows = [before + 1 if before else config.size("sliding_window")] * layers
    near_heads = {**config, "num_key_value_heads": config.size("swa_num_key_value_heads", 2 * kv_heads)}
    near_build = replace(build, config=Config(near_heads, config.name))
    factor = 1.0 if config.get("attention_value_scale") is None else config.factor("attention_value_scale")

    def attend(build: Build, kind: str, windows: Sequence[int]) -> Any:
        ropes = rotate_all(build, rotation(build, dim, partial=True, settings=_rotary(config, kind)))
        plain = grouped_query_attention(build, bias=bias, windows=windows, ropes=ropes)
        return attention_with_values(build, plain, v_dim, factor=factor, bias=bias)

    near, far = with_sinks(near_build, attend(near_build, NEAR, windows)), attend(build, FAR, ())

    def attention(i: int, name: str) -> GQABlock:
        return (near if kinds[i] == NEAR else far)(i, name)

    experts = fine_grained_experts(build, lambda i: blocks[i] == "sparse", shared=SharedExperts())
    return decoder_model(build, attention, experts)


def _read_pattern(config: Config, entry: str, names: tuple[str, str], left_out: list[str]) -> list[str]:
    """The kinds of layers by a list of 0 and 1, as published configs have it, or `left_out` without one."""
    found = list_layers(config, entry, ())
    return [names[mark] if mark in (0, 1) else str(mark) for mark in found] if found else left_out


def _rotary(config: Config, kind: str) -> dict[str, Any]:
    """The rotary settings of a kind of layer: its own, or in published configs the same but for the base."""
    settings = config.rotary(kind=kind)
    if not config.has_rotary_kinds and kind == NEAR:
        settings["rope_theta"] = config.number("swa_rope_theta", 10000.0)
    return {**settings, "partial_rotary_factor": settings.get("partial_rotary_factor", SHARE)}
