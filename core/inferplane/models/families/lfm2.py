"""LFM2, dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    HeadNorms,
    LayerForm,
    decoder_model,
    grouped_query_attention,
    layer_kinds,
    short_convolution,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP

FORM = LayerForm(before=("operator_norm", "ffn_norm"), last="embedding_norm")


@architecture(
    "Lfm2ForCausalLM",
    model_type="lfm2",
    defaults={
        "num_key_value_heads": 8, "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3,
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    },
    aliases={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
)  # fmt: skip
def lfm2(build: Build) -> CausalLM:
    """LFM2: gated short convolutions in most layers, grouped-query attention with norms on each head in the others.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: the LFM2 technical report, arXiv 2511.23404.
    """
    inner = _inner_size(build)
    return lfm2_model(build, lambda i, name: lfm2_mlp(build, name, inner))


def lfm2_model(build: Build, feed_forward: Callable[[int, str], Any]) -> CausalLM:
    """Build LFM2's layers around `feed_forward`, which builds a layer's MLP from its number and its name."""
    config = build.config
    layers = config.size(LAYERS)
    attending = config.get("full_attn_idxs")
    attending = range(layers) if attending is None else attending
    left_out = ["full_attention" if i in attending else "conv" for i in range(layers)]
    kinds = layer_kinds(config, ("full_attention", "conv"), left_out)
    attention = grouped_query_attention(build, norms=HeadNorms(names=("q_layernorm", "k_layernorm")))
    convolution = short_convolution(build)

    def mix(i: int, name: str) -> Any:
        if kinds[i] == "conv":
            return convolution(i, f"model.layers.{i}.conv")
        block = attention(i, name)
        width, columns = block.o.weight.shape
        return replace(block, o=build.linear(f"{name}.out_proj", rows=width, columns=columns, axis=1))

    return decoder_model(build, mix, lambda i, name: feed_forward(i, f"model.layers.{i}.feed_forward"), FORM)


def _inner_size(build: Build) -> int:
    """The inner size of the MLPs: a part of the entry, rounded up to a multiple, unless the config says otherwise."""
    config = build.config
    size = config.size("block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    multiple = config.size("block_multiple_of")
    size = int(config.number("block_ffn_dim_multiplier") * (2 * size // 3))
    return -(-size // multiple) * multiple


def lfm2_mlp(build: Build, name: str, inner: int) -> GatedMLP:
    """Build a gated MLP with LFM2's names."""
    width, mine = build.config.size("hidden_size"), build.local_size("intermediate_size", inner)
    gate_up = build.linear(f"{name}.w1", f"{name}.w3", rows=2 * mine, columns=width, axis=0)
    down = build.linear(f"{name}.w2", rows=width, columns=mine, axis=1)
    return GatedMLP(gate_up, down, reduce=build.reduce())
