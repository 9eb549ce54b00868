"""Architectures of GGUF files with mixtures of experts. Source: the converter in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from inferplane.errors import UnsupportedModelError
from inferplane.gguf.architecture import (
    ARCHITECTURES,
    Architecture,
    Entries,
    ModuleNames,
    StoredTensor,
    layer_types,
    take_expert,
)
from inferplane.gguf.dense import ATTENTION, LLAMA, MLP, PAIRS, granite, plain
from inferplane.gguf.header import TensorEntry
from inferplane.gguf.metadata import Metadata
from inferplane.gguf.rotary import rotary

SOFTMAX, SIGMOID = 1, 2
"""Numbers of gating functions in files."""
EXPERTS: ModuleNames = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_up_exps": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
W123: ModuleNames = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_gate_up_exps": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
}
ONE_SHARED = {name: to.replace("shared_experts", "shared_expert") for name, to in SHARED.items()}
SHARED_MLP = {name: to.replace("shared_experts", "shared_mlp") for name, to in SHARED.items()}


def routing(meta: Metadata) -> Entries:
    """Number of experts, and how many a token takes."""
    return {
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length", meta.size_of_some("feed_forward_length", 0)),
    }


def mixtral(meta: Metadata) -> Entries:
    """Entries of Mixtral, whose files have Llama's architecture."""
    found = routing(meta)
    count = {"num_local_experts": found["num_experts"], "num_experts_per_tok": found["num_experts_per_tok"]}
    return {**plain(meta), "intermediate_size": found["moe_intermediate_size"], **count}


def qwen2_moe(meta: Metadata) -> Entries:
    """Entries of Qwen 2 MoE, whose weights of experts are not normed."""
    shared = meta.size("expert_shared_feed_forward_length", meta.size("feed_forward_length", 0))
    out = {**plain(meta), **routing(meta), "shared_expert_intermediate_size": shared}
    return {**out, "norm_topk_prob": meta.flag("expert_weights_norm")}


def qwen3_moe(meta: Metadata) -> Entries:
    """Entries of Qwen 3 MoE, whose weights of experts are normed."""
    return {**plain(meta), **routing(meta), "norm_topk_prob": meta.flag("expert_weights_norm", True)}


def gpt_oss(meta: Metadata) -> Entries:
    """Entries of gpt-oss: every second layer has a window."""
    out, found = plain(meta), routing(meta)
    rope = out["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | rope
    return {
        **out,
        "num_local_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "intermediate_size": found["moe_intermediate_size"],
        "sliding_window": meta.size("attention.sliding_window"),
        "layer_types": layer_types(meta, lambda i: i % 2 == 0),
    }


def gpt_oss_layer(meta: Metadata, number: int, parts: dict[str, TensorEntry]) -> Iterator[tuple[str, StoredTensor]]:
    """gpt-oss's experts: gate and up are published with their rows in turn."""
    for kind in ("weight", "bias"):
        gate, up = parts.pop(f"ffn_gate_exps.{kind}", None), parts.pop(f"ffn_up_exps.{kind}", None)
        down = parts.pop(f"ffn_down_exps.{kind}", None)
        axes = 3 if kind == "weight" else 2
        if gate is None or up is None or down is None or gate.shape != up.shape or len(gate.shape) != axes:
            raise meta.wrong(f"experts in blk.{number}", None)
        if down.shape[0] != gate.shape[0] or len(down.shape) != axes:
            raise meta.wrong(f"experts in blk.{number}", list(down.shape))
        for e in range(gate.shape[0]):
            one, other, last = (as_row(take_expert(entry, e)) for entry in (gate, up, down))
            name = f"mlp.experts.{e}"
            yield f"{name}.gate_up_proj.{kind}", StoredTensor(one, second=other, join="alternate")
            yield f"{name}.down_proj.{kind}", StoredTensor(last)


def as_row(entry: TensorEntry) -> TensorEntry:
    """A vector as a matrix of one row; a matrix as it is."""
    return replace(entry, shape=(1, *entry.shape)) if len(entry.shape) == 1 else entry


def fine_grained(meta: Metadata) -> Entries:
    """Entries of routing in the form of DeepSeek: groups, first dense layers, shared experts, a factor."""
    found, groups = routing(meta), meta.size("expert_group_count", 1) or 1
    return {
        "n_routed_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "n_shared_experts": meta.size("expert_shared_count", 0),
        "first_k_dense_replace": meta.size("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": meta.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": meta.size("expert_group_used_count", 1 if groups == 1 else None) or 1,
    }


def deepseek2(meta: Metadata) -> Entries:
    """Entries of DeepSeek V2 and V3, Kimi K2 and their like: V3 where experts are chosen by sigmoids.

    Head sizes are those of latent attention as it is published; older files state them as `key_length`.
    """
    rope_dim, latent = meta.size("rope.dimension_count"), meta.size("attention.kv_lora_rank")
    key = meta.size("attention.key_length_mla", meta.size("attention.key_length"))
    value = meta.size("attention.value_length_mla", meta.size("attention.value_length"))
    rope = rotary(meta, dim=rope_dim)
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0} | rope
        mscale = meta.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": round(mscale, 6), "mscale_all_dim": round(mscale, 6)} if mscale else {}
    corrected = meta.has_tensor(".exp_probs_b.bias")
    default = SIGMOID if corrected else SOFTMAX
    is_v3 = meta.size("expert_gating_func", default) == SIGMOID
    out = {
        "num_attention_heads": meta.heads,
        "num_key_value_heads": meta.heads,
        "intermediate_size": meta.size("feed_forward_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": rope,
        "q_lora_rank": meta.size("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        **fine_grained(meta),
    }
    if is_v3:
        names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        return {**out, **names, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    grouped = out["n_group"] > 1
    return {**out, "scoring_func": "softmax", "topk_method": "group_limited_greedy" if grouped else "greedy"}


def deepseek2_layer(meta: Metadata, number: int, parts: dict[str, TensorEntry]) -> Iterator[tuple[str, StoredTensor]]:
    """MLA's projection of keys and values, which newer files have as two tensors."""
    k, v = parts.pop("attn_k_b.weight", None), parts.pop("attn_v_b.weight", None)
    if k is None and v is None:
        return
    if k is None or v is None or len(k.shape) != 3 or len(v.shape) != 3:
        raise meta.wrong(f"attn_k_b and attn_v_b of blk.{number}", None)
    heads, latent = k.shape[:2]
    if (v.shape[0], v.shape[2]) != (heads, latent):
        raise meta.wrong(f"attn_v_b of blk.{number}", list(v.shape))
    yield "self_attn.kv_b_proj.weight", StoredTensor(k, second=v, join="kv_b")


def glm4_moe(meta: Metadata) -> Entries:
    """Entries of GLM 4.5."""
    return {**plain(meta), **fine_grained(meta), "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors}


def dots1(meta: Metadata) -> Entries:
    """Entries of dots.llm1."""
    return {**plain(meta), **fine_grained(meta), "sliding_window": None}


def ernie_moe(meta: Metadata) -> Entries:
    """Entries of ERNIE 4.5 with experts."""
    found = routing(meta)
    return {
        **plain(meta),
        "use_bias": "blk.0.attn_q.bias" in meta.tensors,
        "moe_num_experts": found["num_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "moe_num_shared_experts": meta.size("expert_shared_count", 0),
        "moe_layer_start_index": meta.size("leading_dense_block_count", 0),
        "moe_layer_interval": meta.size("interleave_moe_layer_step", 1),
    }


def hunyuan_moe(meta: Metadata) -> Entries:
    """Entries of Hunyuan with experts."""
    found = routing(meta)
    size = meta.size("expert_shared_feed_forward_length", found["moe_intermediate_size"])
    if size != found["moe_intermediate_size"]:
        raise UnsupportedModelError(
            f"{meta.where} has a shared expert of {size} and experts of {found['moe_intermediate_size']} columns.",
            there_is="Hunyuan models with shared and other experts of one size",
        )
    out = {**plain(meta), "num_experts": found["num_experts"], "intermediate_size": size}
    return {**out, "moe_topk": found["num_experts_per_tok"]}


def minimax_m2(meta: Metadata) -> Entries:
    """Entries of MiniMax M2."""
    out, found = plain(meta), routing(meta)
    return {
        **out,
        "num_local_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "intermediate_size": found["moe_intermediate_size"],
        "rotary_dim": meta.size("rope.dimension_count", meta.head_dim),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
    }


def granite_moe(meta: Metadata) -> Entries:
    """Entries of Granite MoE, with a shared MLP where the file has one."""
    out, found = granite(meta), routing(meta)
    out |= {"num_local_experts": found["num_experts"], "num_experts_per_tok": found["num_experts_per_tok"]}
    if shared := meta.size("expert_shared_feed_forward_length", 0):
        names = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
        out |= {**names, "shared_intermediate_size": shared}
    return out


def olmoe(meta: Metadata) -> Entries:
    """Entries of OLMoE."""
    found = routing(meta)
    out = {**plain(meta), "num_experts": found["num_experts"], "norm_topk_prob": meta.flag("expert_weights_norm")}
    return {**out, "num_experts_per_tok": found["num_experts_per_tok"]}


LATENT: ModuleNames = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **MLP,
}

ARCHITECTURES |= {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        plain,
        LLAMA,
        interleaved=PAIRS,
        moe=Architecture("MixtralForCausalLM", "mixtral", mixtral, {**LLAMA, **W123}, interleaved=PAIRS),
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        qwen2_moe,
        {**LLAMA, **EXPERTS, **ONE_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe, {**LLAMA, **EXPERTS}),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        gpt_oss,
        {
            **ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        rest=gpt_oss_layer,
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", "deepseek_v2", deepseek2, {**LATENT, **EXPERTS, **SHARED}, rest=deepseek2_layer
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        glm4_moe,
        {**LLAMA, **EXPERTS, **SHARED, "post_attention_norm": "post_attention_layernorm"},
    ),
    "dots1": Architecture("Dots1ForCausalLM", "dots1", dots1, {**LLAMA, **EXPERTS, **SHARED}),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        ernie_moe,
        {**LLAMA, **EXPERTS, **SHARED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        hunyuan_moe,
        {
            **LLAMA,
            **EXPERTS,
            **SHARED_MLP,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
        },
    ),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", minimax_m2, {**LLAMA, **W123}),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        granite_moe,
        {
            **LLAMA,
            **{name: to.replace("mlp", "block_sparse_moe") for name, to in EXPERTS.items() if isinstance(to, str)},
            **{name: to.replace("mlp.shared_experts", "block_sparse_moe.shared_mlp") for name, to in SHARED.items()},
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        interleaved=PAIRS,
    ),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", olmoe, {**LLAMA, **EXPERTS}),
}
