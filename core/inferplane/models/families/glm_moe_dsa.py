"""GLM-5: DeepSeek-V3.2's layers in other sizes, some of which share the tokens that one of them chooses."""

from __future__ import annotations

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    fine_grained_experts,
    layer_kinds,
    sparse_latent_attention,
    with_prediction_layers,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

KINDS = {"F": "full", "S": "shared"}
"""Letters of `index_topk_pattern` -> kinds of indexers."""


@architecture(
    "GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "attention_bias": False, "first_k_dense_replace": 3,
        "q_lora_rank": 2048, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
        "index_topk_freq": 1, "index_skip_topk_offset": 2,
    },
    aliases={n: "n_routed_experts" for n in ("num_experts", "num_local_experts")},
)  # fmt: skip
def glm_moe_dsa(build: Build) -> CausalLM:
    """GLM-5: sparse latent attention, in which layers have an indexer or read what the layer before chose, as a list, a
    pattern or a period of the config says; sigmoid routing with a correction bias, shared experts, first dense layers;
    with `build.mtp` also its multi-token-prediction layers, which have indexers.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them; FP8 blocks are
            accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: transformers' modular_glm_moe_dsa; arXiv 2512.02556; shared selections: arXiv 2603.12201.
    """
    config = build.config
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    layers, dense = config.size("num_hidden_layers"), config.count("first_k_dense_replace")
    left_out = ["dense" if i < dense else "sparse" for i in range(layers)]
    kinds = layer_kinds(config, ("dense", "sparse"), left_out, "mlp_layer_types")
    indexers_left_out = _indexers_left_out(config, layers) if config.get("indexer_types") is None else []
    indexers = layer_kinds(config, tuple(KINDS.values()), indexers_left_out, "indexer_types")
    is_shared = lambda i: i < layers and indexers[i] == "shared"  # noqa: E731
    attention = sparse_latent_attention(build, interleave_index=True, is_shared=is_shared)
    feed_forward = fine_grained_experts(build, lambda i: i >= layers or kinds[i] == "sparse")
    return with_prediction_layers(build, decoder_model(build, attention, feed_forward), attention, feed_forward)


def _indexers_left_out(config: Config, layers: int) -> list[str]:
    """The kinds of the layers' indexers by `index_topk_pattern`, letters or names, or by `index_topk_freq`: of the
    layers from `index_skip_topk_offset` - 1 on, one in so many has one; those before have one each.
    """
    pattern = config.get("index_topk_pattern")
    if pattern is None:
        period, offset = max(1, config.count("index_topk_freq")), config.count("index_skip_topk_offset")
        return ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(layers)]
    letters = pattern[:layers] if isinstance(pattern, (str, list)) else []  # of prediction layers come behind
    kinds = [KINDS.get(letter, letter) for letter in letters]
    if len(kinds) != layers:
        raise CheckpointError(
            f"{config.name}: index_topk_pattern is not a string of {layers} letters, one a layer.",
            there_is=repr(pattern),
            remedy="correct the entry, or fetch the file again",
        )
    return kinds
