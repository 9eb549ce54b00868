"""Layers with hyper-connections, and the model around them.

Names of weights are those of transformers' DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane import ops
from inferplane.models.build import Build
from inferplane.models.parts.layers import input_weights, model_around, norm_output_quant
from inferplane.types import Weight


def hyper_layer(build: Build, name: str, attn: Any, mlp: Any) -> ops.HyperLayer:
    """Build a layer with hyper-connections from its attention and its MLP, by its name in the checkpoint.

    Raises:
        CheckpointError: the config lacks an entry, or has an impossible one.
    """
    width = build.config.size("hidden_size")

    def norm(part: str, block: Any) -> ops.AddRMSNorm:
        made = build.add_rms_norm(f"{name}.{part}", width)
        quant = norm_output_quant(*input_weights(block)) if build.activation_quants else None
        return made if quant is None else replace(made, output_quant=quant)

    post = ops.HyperPost(_count_streams(build), width)
    return ops.HyperLayer(
        attn_pre=_pre(build, f"{name}.attn_hc"),
        attn_norm=norm("input_layernorm", attn),
        attn=attn,
        attn_post=post,
        mlp_pre=_pre(build, f"{name}.ffn_hc"),
        mlp_norm=norm("post_attention_layernorm", mlp),
        mlp=mlp,
        mlp_post=post,
        reads_ids=isinstance(mlp, ops.HashMoE),
    )


def hyper_model(build: Build, layers: Sequence[ops.HyperLayer]) -> ops.CausalLM:
    """Build a causal language model around layers with hyper-connections.

    Raises:
        CheckpointError: the config lacks an entry, or has an impossible one.
    """
    model: Any = model_around(build, layers)
    embed = ops.StreamEmbedding(model.embed, _count_streams(build))
    return replace(model, embed=embed, norm=_norm(build, "model.hc_head", "model.norm"))


def hyper_prediction_layer(build: Build, model: ops.CausalLM, name: str, layer: ops.HyperLayer) -> ops.HyperMTPLayer:
    """Build a prediction layer behind a model with hyper-connections, by its name in the checkpoint.

    Args:
        build: its config gives the sizes.
        model: whose embedding and head it shares; published checkpoints repeat them.
        name: of the prediction layer.
        layer: the one inside it.
    """
    width = build.config.size("hidden_size")
    return ops.HyperMTPLayer(
        embed=model.embed_once,
        enorm=build.rms_norm(f"{name}.enorm", width),
        hnorm=build.rms_norm(f"{name}.hnorm", width),
        e_proj=build.linear(f"{name}.e_proj", rows=width, columns=width),
        h_proj=build.linear(f"{name}.h_proj", rows=width, columns=width),
        layer=layer,
        norm=_norm(build, f"{name}.hc_head", f"{name}.shared_head.norm"),
        head=ops.LMHead(model.head.weight),
        streams=_count_streams(build),
        gather=build.gather(),
    )


def _norm(build: Build, head: str, norm: str) -> ops.HyperNorm:
    """Build what stands behind layers with hyper-connections, from the names of head and norm in the checkpoint."""
    width, streams = build.config.size("hidden_size"), _count_streams(build)
    weights = _weights(f"{head}.hc_", streams, streams * width, 1)
    return ops.HyperNorm(ops.HyperHead(*weights, streams, *_epsilons(build)), build.add_rms_norm(norm, width))


def _count_streams(build: Build) -> int:
    return build.config.size("hc_mult")


def _epsilons(build: Build) -> tuple[float, float]:
    """What is added to the streams' mean square, and to the factors of a stream."""
    return build.config.number_from_zero("rms_norm_eps"), build.config.number_from_zero("hc_eps")


def _pre(build: Build, name: str) -> ops.HyperPre:
    config, streams = build.config, _count_streams(build)
    weights = _weights(f"{name}.", 2 * streams + streams**2, streams * config.size("hidden_size"), 3)
    norm_eps, eps = _epsilons(build)
    sinkhorn = ops.Sinkhorn(config.size("hc_sinkhorn_iters"), eps)
    return ops.HyperPre(ops.HyperCollapse(*weights, streams, norm_eps, eps), sinkhorn)


def _weights(prefix: str, rows: int, columns: int, scales: int) -> tuple[Weight, Weight, Weight]:
    """The product's matrix, what is added to its result, and factors of it, in float32 as they are stored."""
    shapes = {"fn": (rows, columns), "base": (rows,), "scale": (scales,)}
    fn, base, scale = (Weight((f"{prefix}{part}",), shape, torch.float32) for part, shape in shapes.items())
    return fn, base, scale
