"""Mistral's own layout of a checkpoint: `params.json` beside `consolidated*.safetensors`.

Source: mistral-inference, `args.py` and `transformer_layers.py`; transformers' convert_mistral_weights_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferplane.errors import UnsupportedModelError
from inferplane.models.reading.safetensors_header import Entry

PARAMS, WEIGHTS = "params.json", "consolidated*.safetensors"
ENTRIES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
MOE_ENTRIES = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
REQUIRED = ("norm_eps", "rope_theta")
WITHOUT_EFFECT = ("causal", "model_type", "max_batch_size")
NAMES = (
    (r"tok_embeddings\.", "model.embed_tokens."),
    (r"output\.", "lm_head."),
    (r"norm\.", "model.norm."),
    (r"layers\.(\d+)\.attention\.w([qkvo])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"layers\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
    (r"layers\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"layers\.(\d+)\.feed_forward\.(gate|experts\.\d+\.w[123])\.", r"model.layers.\1.block_sparse_moe.\2."),
    (r"layers\.(\d+)\.feed_forward\.w1\.", r"model.layers.\1.mlp.gate_proj."),
    (r"layers\.(\d+)\.feed_forward\.w2\.", r"model.layers.\1.mlp.down_proj."),
    (r"layers\.(\d+)\.feed_forward\.w3\.", r"model.layers.\1.mlp.up_proj."),
)
ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.weight")


def has_mistral_format(folder: Path) -> bool:
    """Whether a folder holds a checkpoint in this layout."""
    return (folder / PARAMS).is_file() and any(folder.glob(WEIGHTS))


def config_entries(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entries of a config.json for those of a params.json.

    Args:
        params: the file's entries.
        name: the file, for errors.

    Raises:
        UnsupportedModelError: an entry is not known, or one is missing for which readers have different defaults.
    """
    moe = params.get("moe") or {}
    unknown = [k for k, v in params.items() if v and k not in (*ENTRIES, *WITHOUT_EFFECT, "moe")]
    unknown += [f"moe.{key}" for key in moe if key not in MOE_ENTRIES]
    if unknown or (missing := [key for key in REQUIRED if params.get(key) is None]):
        what = f"has {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        raise UnsupportedModelError(
            f"{name} {what}: such a model is not read from Mistral's own layout.",
            there_is=", ".join((*ENTRIES, "moe")),
            remedy="fetch the model in the Hugging Face layout (config.json, model.safetensors)",
        )
    out = {"sliding_window": None, "max_position_embeddings": None}
    out |= {ENTRIES[key]: value for key, value in params.items() if key in ENTRIES}
    out |= {MOE_ENTRIES[key]: value for key, value in moe.items()}
    return {**out, "model_type": "mixtral" if moe else "mistral"}


def rename(entries: Mapping[str, Entry], head_dim: int) -> dict[str, Entry]:
    """The tensors under Hugging Face's names; q and k have their rows in that layout's order when they are read."""
    out = {}
    for stored, entry in entries.items():
        name = next((re.sub(old, new, stored, count=1) for old, new in NAMES if re.match(old, stored)), stored)
        rotated = name != stored and ROTATED.fullmatch(name)
        out[name] = replace(entry, interleaved=head_dim) if rotated else entry
    return out
