"""gpt-oss 20b and 120b."""

from __future__ import annotations

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    experts_per_token,
    grouped_query_attention,
    layer_windows,
    with_sinks,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, ClampedExperts, MoE, MoERoute
from inferplane.types import Shard, Weight

COUNT = "num_local_experts"


@architecture(
    "GptOssForCausalLM",
    model_type="gpt_oss",
    defaults={
        "head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0, "attention_bias": True,
        "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    aliases={"num_experts": COUNT},
    stacks_experts="inputs_first",
)  # fmt: skip
def gpt_oss(build: Build) -> CausalLM:
    """gpt-oss: grouped-query attention with a sink a head, a window in every second layer; experts with biases and a
    clamped gate, weighed by a softmax over the chosen.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints; their MXFP4
            experts are accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: the gpt-oss model card, arXiv 2508.10925.
    """
    config = build.config
    config.refuse(hidden_act=("silu",))
    bias, windows = config.flag("attention_bias"), layer_windows(config, lambda i: i % 2 == 0)
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=windows)
    # The softmax over the chosen experts' logits is that over all experts, divided by the sum over the chosen.
    route = MoERoute(None, experts_per_token(config, COUNT), "softmax")

    return decoder_model(build, with_sinks(build, attention), lambda i, name: _experts(build, name, route))


def _experts(build: Build, name: str, route: MoERoute) -> MoE:
    """Build a layer's experts; either a slice of each is on this rank, or some of them in full."""
    config, place = build.config, build.placement
    width, total, inner = (config.size(entry) for entry in ("hidden_size", COUNT, "intermediate_size"))
    mine = place.experts(COUNT, total)
    divided = len(mine) == total
    rows = build.local_size("intermediate_size", inner) if divided else inner
    if not divided:
        build.ignore(f"{name}.experts.*")  # experts of the other ranks
    gate_up, down = ([f"{name}.experts.{e}.{part}_proj" for e in mine] for part in ("gate_up", "down"))
    half = Shard(1, place.tp_rank, place.tp_size) if divided else Shard()
    experts = ClampedExperts(
        build.weight(gate_up, (len(mine), 2 * rows, width), 0 if divided else None),
        Weight(tuple(f"{part}.bias" for part in gate_up), (len(mine), 2 * rows), shard=half),
        build.weight(down, (len(mine), width, rows), 1 if divided else None),
        None if divided and place.tp_rank else Weight(tuple(f"{part}.bias" for part in down), (len(mine), width)),
        alpha=config.number("swiglu_alpha"),
        limit=config.number("swiglu_limit"),
        partial=not divided,
    )
    router = build.linear(f"{name}.router", rows=total, columns=width, bias=True, out_dtype=torch.float32)
    here = None if divided else (mine[0], len(mine))
    return MoE(router, route, experts, reduce=build.reduce(), here=here)
