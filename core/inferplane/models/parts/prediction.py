"""Layers for multi-token prediction behind a model, as DeepSeek-V3 has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inferplane.models.build import Build
from inferplane.models.parts.layers import LAYERS, decoder_layer
from inferplane.ops import CausalLM, LMHead, MTPLayer


def with_prediction_layers(
    build: Build, model: CausalLM, attention: Callable[[int, str], Any], feed_forward: Callable[[int, str], Any]
) -> CausalLM:
    """A model with its `num_nextn_predict_layers` prediction layers, if `build.mtp` says so; else their tensors are not
    read.

    Args:
        build: names of tensors are those of layers behind the model's own.
        model: without them.
        attention, feed_forward: build a layer's parts, as for `decoder_model`.

    Source: arXiv 2412.19437, section 2.2; names of weights as in the published checkpoints.
    """
    config = build.config
    width, layers = config.size("hidden_size"), config.size(LAYERS)

    def mtp(i: int) -> MTPLayer:
        prefix = f"model.layers.{i}"
        return MTPLayer(
            embed=model.embed_once,  # published checkpoints repeat embedding and head; they are the main model's own
            enorm=build.rms_norm(f"{prefix}.enorm", width),
            hnorm=build.rms_norm(f"{prefix}.hnorm", width),
            eh_proj=build.linear(f"{prefix}.eh_proj", rows=width, columns=2 * width),
            layer=decoder_layer(build, i, attention(i, f"{prefix}.self_attn"), feed_forward(i, f"{prefix}.mlp")),
            norm=build.add_rms_norm(f"{prefix}.shared_head.norm", width),
            head=LMHead(model.head.weight),
            gather=build.gather(),
        )

    extra = config.count("num_nextn_predict_layers")
    for k in range(extra):
        unread = ("embed_tokens.weight", "shared_head.head.weight") if build.mtp else ("*",)
        build.ignore(*(f"model.layers.{layers + k}.{name}" for name in unread))
    return replace(model, mtp=tuple(mtp(layers + k) for k in range(extra))) if build.mtp else model
