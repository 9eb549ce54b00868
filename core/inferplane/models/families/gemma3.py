"""Gemma 3, text."""

from __future__ import annotations

from typing import Any

from inferplane.models.build import Build
from inferplane.models.families.gemma2 import DEFAULTS, FOUR_NORMS
from inferplane.models.parts import (
    LAYERS,
    HeadNorms,
    decoder_model,
    dense_mlp,
    grouped_query_attention,
    head_size,
    layer_windows,
    rotation,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        **DEFAULTS,
        # Published configs of the larger models leave these sizes out, too.
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    aliases={"hidden_activation": "hidden_act"},
)
def gemma3(build: Build) -> CausalLM:
    """Gemma 3: Gemma 2 with norms on each head's q and k in place of soft caps; five layers of six attend to a window,
    with rotary settings of their own.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2503.19786.
    """
    config = build.config
    config.refuse(use_bidirectional_attention=(False,), attn_logit_softcapping=())
    every, bias = config.size("sliding_window_pattern"), config.flag("attention_bias")
    windows = layer_windows(config, lambda i: (i + 1) % every != 0)
    dim, layers = head_size(config), config.size(LAYERS)
    near, far = (
        rotation(build, dim, settings=_rotary(config, kind)) for kind in ("sliding_attention", "full_attention")
    )
    ropes = [near if window else far for window in windows] or [far] * layers
    scale = config.number("query_pre_attn_scalar") ** -0.5
    attention = grouped_query_attention(
        build, bias=bias, out_bias=bias, norms=HeadNorms(offset=True), windows=windows, ropes=ropes, scale=scale
    )
    cap = None if config.get("final_logit_softcapping") is None else config.number("final_logit_softcapping")
    root, mlp = config.size("hidden_size") ** 0.5, dense_mlp(build, act="gelu_tanh")
    return decoder_model(build, attention, mlp, FOUR_NORMS, embed_factor=root, logit_cap=cap)


def _rotary(config: Config, kind: str) -> dict[str, Any]:
    """The rotary settings of a kind of layer; those with a window are never scaled unless the config says so."""
    if kind == "full_attention":
        return config.rotary(kind=kind)
    stated = config.rotary(kind=kind) if config.has_rotary_kinds else {"rope_type": "default"}
    own = config["rope_parameters"].get(kind) or {}
    return {**stated, "rope_theta": own.get("rope_theta") or config.number("rope_local_base_freq")}
