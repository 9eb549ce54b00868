"""Architectures of GGUF files with dense layers of attention and MLP. Source: the converter in llama.cpp."""

from __future__ import annotations

from inferplane.gguf.architecture import (
    ARCHITECTURES,
    Architecture,
    Entries,
    ModuleNames,
    attention,
    biases,
    layer_types,
)
from inferplane.gguf.metadata import Metadata
from inferplane.gguf.rotary import LONG, rotary

ATTENTION: ModuleNames = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP: ModuleNames = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA: ModuleNames = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
FUSED: ModuleNames = {
    **LLAMA,
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
AFTER: ModuleNames = {
    **{name: to for name, to in {**ATTENTION, **MLP}.items() if name != "attn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms behind attention and MLP only."""
PAIRS = ("attn_q", "attn_k")


def plain(meta: Metadata) -> Entries:
    """Entries of a model like Llama, with biases where the file has some."""
    return {"hidden_act": "silu", **attention(meta), **biases(meta)}


def without_act(meta: Metadata) -> Entries:
    """As `plain`, of a family that knows one activation."""
    return {key: value for key, value in plain(meta).items() if key != "hidden_act"}


def phi3(meta: Metadata) -> Entries:
    """Entries of Phi-3: no window counts as one of 0."""
    dim = meta.size("embedding_length") // meta.heads
    out = {**plain(meta), "head_dim": dim, "rope_parameters": rotary(meta, dim=dim)}
    original = meta.size("rope.scaling.original_context_length", meta.size("context_length"))
    out["sliding_window"] = meta.size("attention.sliding_window", 0) or None
    out["original_max_position_embeddings"] = original
    out["partial_rotary_factor"] = out["rope_parameters"].pop("partial_rotary_factor", 1.0)
    if LONG in meta.tensors and meta.has("rope.scaling.attn_factor"):
        out["rope_parameters"]["attention_factor"] = meta.number("rope.scaling.attn_factor")
    return out


def granite(meta: Metadata) -> Entries:
    """Entries of Granite: four factors."""
    return {
        **plain(meta),
        "attention_multiplier": meta.number("attention.scale"),
        "embedding_multiplier": meta.number("embedding_scale"),
        "residual_multiplier": meta.number("residual_scale"),
        "logits_scaling": meta.number("logit_scale"),
    }


def olmo2(meta: Metadata) -> Entries:
    """Entries of OLMo 2, or of OLMo 3, which has windows."""
    out = plain(meta)
    if not meta.has("attention.sliding_window"):
        return out
    kinds = layer_types(meta, lambda i: (i + 1) % 4 != 0)
    near = {"rope_type": "default", "rope_theta": out["rope_parameters"]["rope_theta"]}
    if meta.has("rope.freq_base_swa"):
        near["rope_theta"] = meta.number("rope.freq_base_swa")
    both = {"full_attention": out["rope_parameters"], "sliding_attention": near}
    return {
        **out,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": meta.size("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": both if near != out["rope_parameters"] else out["rope_parameters"],
    }


def exaone4(meta: Metadata) -> Entries:
    """Entries of EXAONE 4: windows in most layers of the large model, in none of the small one."""
    out = plain(meta)
    if not meta.size("attention.sliding_window", 0):
        return {**out, "sliding_window": None, "layer_types": ["full_attention"] * meta.layers}
    kinds = layer_types(meta, lambda i: (i + 1) % 4 != 0)
    return {**out, "sliding_window": meta.size("attention.sliding_window"), "layer_types": kinds}


def cohere(meta: Metadata) -> Entries:
    """Entries of Command R."""
    out = {**plain(meta), "layer_norm_eps": meta.number("attention.layer_norm_epsilon")}
    norms = "blk.0.attn_q_norm.weight" in meta.tensors
    return {**out, "logit_scale": meta.number("logit_scale"), "use_qk_norm": norms}


def cohere2(meta: Metadata) -> Entries:
    """Entries of Command R7B: three layers of four have a window."""
    kinds = layer_types(meta, lambda i: (i + 1) % 4 != 0)
    window = meta.size("attention.sliding_window")
    out = {key: value for key, value in cohere(meta).items() if key != "use_qk_norm"}
    return {**out, "sliding_window": window, "layer_types": kinds}


def starcoder2(meta: Metadata) -> Entries:
    """Entries of StarCoder 2: plain MLPs and LayerNorm, biases everywhere."""
    out = {**attention(meta), "hidden_act": "gelu_pytorch_tanh", "use_bias": "blk.0.attn_q.bias" in meta.tensors}
    return {**out, "norm_epsilon": meta.number("attention.layer_norm_epsilon"), "sliding_window": None}


def smollm3(meta: Metadata) -> Entries:
    """Entries of SmolLM3: every fourth layer has no positions, which no file states."""
    return {**plain(meta), "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(meta.layers)]}


def seed_oss(meta: Metadata) -> Entries:
    """Entries of Seed-OSS: biases on q, k and v, not behind attention."""
    out = {**plain(meta), "attention_out_bias": "blk.0.attn_output.bias" in meta.tensors}
    return out


def ernie(meta: Metadata) -> Entries:
    """Entries of ERNIE 4.5: one flag for all biases."""
    return {**plain(meta), "use_bias": "blk.0.attn_q.bias" in meta.tensors}


def arcee(meta: Metadata) -> Entries:
    """Entries of Arcee: an MLP without a gate."""
    return {**plain(meta), "hidden_act": "relu2"}


ARCHITECTURES |= {
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", plain, LLAMA),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", plain, LLAMA),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", phi3, FUSED),
    "granite": Architecture("GraniteForCausalLM", "granite", granite, LLAMA, interleaved=PAIRS),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", olmo2, AFTER),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", smollm3, LLAMA, interleaved=PAIRS),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", "seed_oss", seed_oss, {**LLAMA, "post_attention_norm": "post_attention_layernorm"}
    ),
    "arcee": Architecture("ArceeForCausalLM", "arcee", arcee, LLAMA, interleaved=PAIRS),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", exaone4, AFTER),
    "command-r": Architecture("CohereForCausalLM", "cohere", cohere, LLAMA),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", cohere2, LLAMA),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", ernie, LLAMA),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        plain,
        {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        plain,
        {
            **FUSED,
            "attn_qkv": ATTENTION["attn_qkv"],
            "ffn_norm": "post_attention_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", starcoder2, {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
}
