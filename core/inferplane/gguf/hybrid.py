"""Architectures of GGUF files with recurrent layers. Source: the converter in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from inferplane.gguf.architecture import ARCHITECTURES, Architecture, Entries, ModuleNames, StoredTensor
from inferplane.gguf.dense import ATTENTION, LLAMA, PAIRS, granite, plain
from inferplane.gguf.experts import EXPERTS, ONE_SHARED, fine_grained, granite_moe, qwen2_moe, routing
from inferplane.gguf.header import TensorEntry
from inferplane.gguf.metadata import Metadata

CONVOLUTIONS: ModuleNames = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{e}.w1",
    "ffn_up_exps": "feed_forward.experts.{e}.w3",
    "ffn_down_exps": "feed_forward.experts.{e}.w2",
}
RECURRENT: ModuleNames = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out": "linear_attn.out_proj",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
MAMBA: ModuleNames = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out": "mamba.out_proj",
}
FALCON_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
"""Entries of Falcon-H1's configs, besides two lists."""
NEMOTRON_NAMES = {
    "mamba_d_conv": "conv_kernel",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
"""Nemotron-H's names of the entries of its mixers."""


def lfm2(meta: Metadata) -> Entries:
    """Entries of LFM2: the heads of keys and values by layer tell its kind."""
    counts = meta.sizes("attention.head_count_kv", meta.layers)
    out = plain(meta)
    return {
        **out,
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": meta.size("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in meta.tensors,
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(meta: Metadata) -> Entries:
    """Entries of LFM2 with experts, chosen by sigmoids with a bias."""
    corrected = meta.has_tensor(".exp_probs_b.bias")
    norm = meta.flag("expert_weights_norm", True)
    first = meta.size("leading_dense_block_count", 0)
    return {
        **lfm2(meta),
        **routing(meta),
        "num_dense_layers": first,
        "use_expert_bias": corrected,
        "norm_topk_prob": norm,
    }


def recurrent(meta: Metadata) -> Entries:
    """Entries of gated delta nets, and attention in every n-th layer."""
    values = meta.size("ssm.time_step_rank")
    kinds = meta.flags("attention.recurrent_layers")
    every = meta.size("full_attention_interval", 4)
    flags = kinds or [(i + 1) % every != 0 for i in range(meta.layers)]
    return {
        **plain(meta),
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "linear_key_head_dim": meta.size("ssm.state_size"),
        "linear_num_key_heads": meta.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": meta.size("ssm.inner_size") // max(values, 1),
        "full_attention_interval": every,
        "layer_types": ["linear_attention" if kind else "full_attention" for kind in flags[: meta.layers]],
        "attention_bias": False,
    }


def recurrent_experts(meta: Metadata) -> Entries:
    """The same with experts beside a shared one."""
    return {**qwen2_moe(meta), **recurrent(meta), "norm_topk_prob": True}


def value_heads(meta: Metadata) -> tuple[int, int, int, int]:
    """Key heads, value heads of each, and the entries a head of both.

    Raises:
        CheckpointError: they do not divide each other.
    """
    keys, values = meta.size("ssm.group_count"), meta.size("ssm.time_step_rank")
    if not keys or not values or values % keys or meta.size("ssm.inner_size") % values:
        raise meta.wrong("a number of value heads that its key heads divide", values)
    return keys, values // keys, meta.size("ssm.state_size"), meta.size("ssm.inner_size") // values


def by_key_head(meta: Metadata, number: int, parts: dict[str, TensorEntry]) -> Iterator[tuple[str, StoredTensor]]:
    """Qwen3-Next's projection of q, k, v and z: published by key heads, in files all of q, then k, v and z."""
    qkv, z = parts.get("attn_qkv.weight"), parts.get("attn_gate.weight")
    if qkv is None or z is None:
        return
    keys, each, dim, size = value_heads(meta)
    starts, sizes = (0, keys * dim, 2 * keys * dim, 2 * keys * dim + keys * each * size), (dim, dim, *[each * size] * 2)
    order = tuple(start + head * n + i for head in range(keys) for start, n in zip(starts, sizes) for i in range(n))
    if (
        len(qkv.shape) != 2
        or len(z.shape) != 2
        or qkv.shape[0] + z.shape[0] != len(order)
        or qkv.shape[1] != z.shape[1]
    ):
        raise meta.wrong(f"attn_qkv and attn_gate of blk.{number} with {len(order)} rows", list(qkv.shape))
    del parts["attn_qkv.weight"], parts["attn_gate.weight"]
    yield "linear_attn.in_proj_qkvz.weight", StoredTensor(qkv, second=z, join="rows", order=order)


def by_value_head(meta: Metadata, number: int, parts: dict[str, TensorEntry]) -> Iterator[tuple[str, StoredTensor]]:
    """Qwen 3.5's value heads: published by key heads, in files the first of every key head, then the second."""
    if "attn_gate.weight" not in parts:
        return
    keys, each, dim, size = value_heads(meta)
    heads = [number * keys + key for key in range(keys) for number in range(each)]
    rows = tuple(head * size + i for head in heads for i in range(size))
    before = tuple(range(2 * keys * dim))
    behind = before + tuple(len(before) + row for row in rows)
    orders = {
        "attn_qkv.weight": ("in_proj_qkv.weight", behind),
        "attn_gate.weight": ("in_proj_z.weight", rows),
        "ssm_alpha.weight": ("in_proj_a.weight", tuple(heads)),
        "ssm_beta.weight": ("in_proj_b.weight", tuple(heads)),
        "ssm_a": ("A_log", tuple(heads)),
        "ssm_dt.bias": ("dt_bias", tuple(heads)),
        "ssm_conv1d.weight": ("conv1d.weight", behind),
        "ssm_out.weight": ("out_proj.weight", rows),
    }
    for name, (title, order) in orders.items():
        entry = parts.pop(name, None)
        axis = -1 if name == "ssm_out.weight" else 0
        if entry is None or entry.shape[axis] != len(order):
            raise meta.wrong(f"a tensor blk.{number}.{name} of {len(order)}", entry and list(entry.shape))
        stored = StoredTensor(entry, is_exponential=name == "ssm_a")
        if order != tuple(range(len(order))):
            stored = replace(stored, column_order=order) if axis else replace(stored, order=order)
        yield f"linear_attn.{title}", stored


def mamba_2(meta: Metadata) -> Entries:
    """Entries of Mamba-2's mixers, as most configs name them."""
    heads, inner = meta.size("ssm.time_step_rank"), meta.size("ssm.inner_size")
    return {
        "mamba_d_conv": meta.size("ssm.conv_kernel"),
        "mamba_d_state": meta.size("ssm.state_size"),
        "mamba_n_groups": meta.size("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(heads, 1),
        "mamba_conv_bias": meta.has_tensor(".ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_tensor(".ssm_in.bias"),
    }


def granite_hybrid(meta: Metadata) -> Entries:
    """Entries of Granite 4: Mamba-2 where there are no heads of keys and values."""
    counts = meta.sizes("attention.head_count_kv", meta.layers)
    out = granite_moe(meta) if meta.size("expert_count", 0) else {**granite(meta), "num_local_experts": 0}
    return {
        **out,
        **mamba_2(meta),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "shared_intermediate_size": meta.size("expert_shared_feed_forward_length", meta.size("feed_forward_length")),
        "mamba_expand": meta.size("ssm.inner_size") // meta.size("embedding_length"),
        "position_embedding_type": "rope" if meta.flag("rope.scaling.finetuned") else "nope",
    }


def falcon_h1(meta: Metadata) -> Entries:
    """Entries of Falcon-H1, whose factors files have in the weights."""
    return {
        **plain(meta),
        **dict.fromkeys(FALCON_FACTORS, 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        **mamba_2(meta),
        "mamba_d_ssm": meta.size("ssm.inner_size"),
        "projectors_bias": meta.has_tensor(".ssm_out.bias"),
        "mamba_rms_norm": meta.has_tensor(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _kind_of(meta: Metadata, number: int) -> str:
    """What a layer of Nemotron-H is, by its tensors."""
    for name, kind in (("ssm_in", "mamba"), ("attn_q", "attention"), ("ffn_gate_inp", "moe")):
        if f"blk.{number}.{name}.weight" in meta.tensors:
            return kind
    return "mlp"


def nemotron_h(meta: Metadata) -> Entries:
    """Entries of Nemotron-H, whose layers have one block each."""
    mixer = mamba_2(meta)
    kinds = [_kind_of(meta, number) for number in range(meta.layers)]
    out = {key: value for key, value in plain(meta).items() if key not in ("hidden_act", "rope_parameters")}
    out["layer_norm_epsilon"] = out.pop("rms_norm_eps")
    if "moe" in kinds:
        shared = meta.size("expert_shared_feed_forward_length")
        out |= {**fine_grained(meta), "moe_shared_expert_intermediate_size": shared}
    if meta.has("moe_latent_size"):
        out["moe_latent_size"] = meta.size("moe_latent_size")
    return {
        **out,
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
        "attention_bias": meta.has_tensor(".attn_q.bias"),
        "mlp_bias": meta.has_tensor(".ffn_up.bias") or meta.has_tensor(".ffn_up_shexp.bias"),
        **{title: mixer[name] for name, title in NEMOTRON_NAMES.items()},
    }


_MIXER: ModuleNames = {name: to.replace("mamba.", "mixer.") for name, to in MAMBA.items() if isinstance(to, str)}
NEMOTRON: ModuleNames = {
    **_MIXER,
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{e}.up_proj",
    "ffn_down_exps": "mixer.experts.{e}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_NEMOTRON = Architecture(
    "NemotronHForCausalLM",
    "nemotron_h",
    nemotron_h,
    NEMOTRON,
    outside={"token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight"},
    inside="backbone.layers",
)
_GRANITE = ARCHITECTURES["granitemoe"].modules
_SHARED: ModuleNames = {
    "ffn_gate": "block_sparse_moe.shared_mlp.gate_proj",
    "ffn_up": "block_sparse_moe.shared_mlp.up_proj",
    "ffn_down": "block_sparse_moe.shared_mlp.down_proj",
}
_BESIDE: ModuleNames = {**ONE_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_EXPERTS: ModuleNames = {**RECURRENT, **EXPERTS, **_BESIDE}


ARCHITECTURES |= {
    "lfm2": Architecture(
        "Lfm2ForCausalLM", "lfm2", lfm2, CONVOLUTIONS, outside={"token_embd_norm.weight": "model.embedding_norm.weight"}
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        lfm2_moe,
        CONVOLUTIONS,
        outside={"token_embd_norm.weight": "model.embedding_norm.weight"},
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", "qwen3_next", recurrent_experts, _EXPERTS, norms_add=1.0, rest=by_key_head
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", recurrent, RECURRENT, norms_add=1.0, rest=by_value_head
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", recurrent_experts, _EXPERTS, norms_add=1.0, rest=by_value_head
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        granite_hybrid,
        {**_GRANITE, **MAMBA, **_SHARED},
        interleaved=PAIRS,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        "falcon_h1",
        falcon_h1,
        {
            **ATTENTION,
            **MAMBA,
            "ffn_norm": "pre_ff_layernorm.weight",  # as files have it, without a suffix
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        outside={"output_norm.weight": "model.final_layernorm.weight"},
    ),
}
