"""DeepSeek-V4: hyper-connections, attention of one KV head over a window and compressed entries, hash routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    SharedExperts,
    SharedKVNames,
    count_rotated,
    experts_per_token,
    hyper_layer,
    hyper_model,
    hyper_prediction_layer,
    layer_kinds,
    limit_gates,
    mixture_of_experts,
    shared_kv_attention,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.models.rope import yarn_factor
from inferplane.ops import CausalLM, HashMoE, HashRoute, HyperLayer, MoE, MoERoute
from inferplane.types import Weight

KINDS, FAR_BASE = ("main", "compress"), "compress_rope_theta"
COUNT, HASH, TOP = "n_routed_experts", "hash_moe", "moe"
NAMES = SharedKVNames(
    "q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj", "sinks",
    values="kv_proj", gates="gate_proj", bias="position_bias", norm="kv_norm", index_q="q_b_proj",
)  # fmt: skip
"""The attention's names in transformers, to which published ones are brought."""
RENAMES = {
    r"^(?:model\.)?(?=(?:layers|mtp|norm|embed|embed_tokens|hc_head)[._])": "model.",
    r"^(?:model\.)?(?:lm_)?head\.": "lm_head.",
    r"^model\.embed\.": "model.embed_tokens.",
    r"\.emb\.tok_emb\.": ".embed_tokens.",
    r"(\.mtp\.\d+)\.(head|norm)\.": r"\1.shared_head.\2.",
    r"\.hc_head_": ".hc_head.hc_",
    r"\.hc_(attn|ffn)_": r".\1_hc.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.attn\.": ".self_attn.",
    r"\.ffn\.": ".mlp.",
    r"\.compressor\.indexer\.(?:scorer\.)?(q_b_proj|wq_b|weights_proj)\.": r".indexer.\1.",
    r"\.compressor\.indexer\.": ".indexer.compressor.",
    r"(\.self_attn(?:\.indexer)?(?:\.compressor)?)\.norm\.": r"\1.kv_norm.",
    r"\.q_norm\.": ".q_a_norm.",
    r"\.w(q_a|q_b|kv|gate|o_a|o_b)\.": r".\1_proj.",
    r"\.attn_sink$": ".sinks",
    r"\.ape$": ".position_bias",
    r"\.gate\.bias$": ".gate.e_score_correction_bias",
    r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.",
    r"\.w3\.": ".up_proj.",
    r"_proj\.scale$": "_proj.weight_scale",
}
"""Parts of published names -> those of transformers' modules, one after the other."""


@architecture(
    "DeepseekV4ForCausalLM",
    model_type="deepseek_v4",
    defaults={
        "max_position_embeddings": 1048576, "attention_bias": False, "mlp_bias": False, "num_hash_layers": 3,
        "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "n_shared_experts": 1,
    },
    aliases={n: COUNT for n in ("num_experts", "num_local_experts")} | {"intermediate_size": "moe_intermediate_size"},
    renames=RENAMES,
)  # fmt: skip
def deepseek_v4(build: Build) -> CausalLM:
    """DeepSeek-V4: layers on several residual streams; in each, attention of one KV head within a window, with
    compressed entries of all tokens beside it or without; experts that a table chooses by token ids in the first
    layers, and by a router with a correction bias in the others; a shared expert; limits before the activation; with
    `build.mtp` also its multi-token-prediction layers.

    Args:
        build: config, placement and weight formats. Weights are named as in transformers; published names are brought
            to these. FP8 blocks, and experts in MXFP4, are accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: DeepSeek-V4 (transformers' modeling_deepseek_v4); hyper-connections: arXiv 2512.24880.
    """
    build = replace(build, config=settle_rotation(build.config))
    config = build.config
    config.refuse(attention_bias=(False,), mlp_bias=(False,), n_shared_experts=(1,), num_key_value_heads=(1,))
    config.refuse(norm_topk_prob=(True,), topk_method=("noaux_tc",))
    attention, feed_forward = shared_kv_attention(build, names=NAMES), experts(build)

    def layer(i: int, name: str) -> HyperLayer:
        return hyper_layer(build, name, attention(i, f"{name}.self_attn"), feed_forward(i, f"{name}.mlp"))

    layers, extra = config.size(LAYERS), config.count("num_nextn_predict_layers")
    model = hyper_model(build, [layer(i, f"model.layers.{i}") for i in range(layers)])
    names = [f"model.mtp.{k}" for k in range(extra)]
    unread = ("embed_tokens.weight", "shared_head.head.weight") if build.mtp else ("*",)
    build.ignore(*(f"{name}.{part}" for name in names for part in unread))
    if not build.mtp:
        return model
    mtp = tuple(hyper_prediction_layer(build, model, n, layer(layers + k, n)) for k, n in enumerate(names))
    return replace(model, mtp=mtp, returns_streams=bool(mtp))


def settle_rotation(config: Config) -> Config:
    """A config with rotary settings of their own for layers within a window ("main") and for those with compressed
    entries ("compress"), and with the number of entries of a head that are rotated.

    Where one object has the settings of all layers, its scaling is that of "compress", with a base of its own, and a
    factor of 1 on cosines and sines unless it states another, as in transformers.

    Raises:
        CheckpointError: an entry is missing or impossible.
        UnsupportedModelError: the two kinds of layers rotate different numbers of entries.
    """
    settings = dict(config["rope_parameters"] if config.has_rotary_kinds else config.rotary())
    whole = settings.pop("partial_rotary_factor", None)
    if config.has_rotary_kinds:
        kinds = {kind: dict(config.rotary(kind=kind)) for kind in KINDS}
        shares = [kind.pop("partial_rotary_factor", whole) for kind in kinds.values()]
        if shares[0] != shares[1]:
            config.check("rope_parameters", tuple(shares), ())
        size = count_rotated(config, shares[0])
        for kind in kinds.values():
            if kind["rope_type"] == "yarn":
                kind["attention_factor"] = yarn_factor(kind)
    else:
        size = count_rotated(config, whole)
        base, scaled = config.rotary()["rope_theta"], {"attention_factor": 1.0} | settings
        far = {**(scaled if settings["rope_type"] == "yarn" else settings), "rope_theta": config.number(FAR_BASE)}
        kinds = {"main": {"rope_type": "default", "rope_theta": base}, "compress": far}
    return Config({**config, "rope_parameters": kinds, "qk_rope_head_dim": size}, config.name)


def experts(build: Build) -> Callable[[int, str], MoE | HashMoE]:
    """Return a function that builds a layer's experts from the layer's number and the MLP's name. Layers behind the
    model's have a router.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.
    """
    config = build.config
    layers, first = config.size(LAYERS), config.count("num_hash_layers")
    left_out = [HASH if i < first else TOP for i in range(layers)]
    kinds = layer_kinds(config, (HASH, TOP), left_out, "mlp_layer_types")
    total, chosen, vocab = config.size(COUNT), experts_per_token(config, COUNT), config.size("vocab_size")
    score, factor = config.get("scoring_func"), config.factor("routed_scaling_factor")
    config.check("scoring_func", score, ("sqrtsoftplus", "sigmoid", "softmax"))
    shared, limit = SharedExperts(config.size("moe_intermediate_size")), config.number("swiglu_limit")

    def feed_forward(i: int, name: str) -> MoE | HashMoE:
        bias = Weight((f"{name}.gate.e_score_correction_bias",), (total,), torch.float32)
        route = MoERoute(bias, chosen, score, factor=factor)  # type: ignore[arg-type]
        made = mixture_of_experts(build, name, route, count=COUNT, shared=shared)
        block = limit_gates(made, limit, limit, limits_input=True)
        if i >= layers or kinds[i] == TOP:
            return block
        table = Weight((f"{name}.gate.tid2eid",), (vocab, chosen), torch.int32)
        by_id = HashRoute(table, score, factor=factor)  # type: ignore[arg-type]
        return HashMoE(block.router, by_id, block.experts, block.shared, block.reduce, block.here)

    return feed_forward
