"""Gemma's architectures of GGUF files. Norms have the 1 added. Source: the converter in llama.cpp."""

from __future__ import annotations

from inferplane.gguf.architecture import ARCHITECTURES, Architecture, Entries, ModuleNames, attention, layer_types
from inferplane.gguf.dense import ATTENTION, LLAMA, MLP
from inferplane.gguf.metadata import Metadata

FOUR_NORMS: ModuleNames = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LARGEST_2, LARGEST_3 = 46, 62
"""Layers of the largest Gemma 2 and 3, the only ones whose scores are not scaled by the head dim. Files do not state
the scale; llama.cpp takes it from the number of layers, too."""


def gemma(meta: Metadata) -> Entries:
    """Entries of Gemma."""
    return {**attention(meta), "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def gemma2(meta: Metadata) -> Entries:
    """Entries of Gemma 2: every second layer has a window."""
    return {
        **gemma(meta),
        "query_pre_attn_scalar": _scale(meta, LARGEST_2),
        "sliding_window": meta.size("attention.sliding_window", 4096),
        "layer_types": layer_types(meta, lambda i: i % 2 == 0),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


def gemma3(meta: Metadata) -> Entries:
    """Entries of a Gemma 3's config (its text model): every sixth layer attends to all tokens."""
    out = gemma(meta)
    rope = attention(meta, theta=1e6)["rope_parameters"]
    near = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10000.0)}
    cap = meta.number("final_logit_softcapping", 0.0)
    return {
        **out,
        "query_pre_attn_scalar": _scale(meta, LARGEST_3),
        "sliding_window": meta.size("attention.sliding_window"),
        "layer_types": layer_types(meta, lambda i: i % 6 != 5),
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap or None,
    }


def _scale(meta: Metadata, largest: int) -> int:
    return meta.size("embedding_length") // meta.heads if meta.layers == largest else meta.head_dim


ARCHITECTURES |= {
    "gemma": Architecture("GemmaForCausalLM", "gemma", gemma, LLAMA, norms_add=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", gemma2, FOUR_NORMS, norms_add=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", gemma3, FOUR_NORMS, norms_add=1.0),
}
