"""Turns a GGUF file into a folder in the Hugging Face layout: config, float32 weights, tokenizer, chat template.

    python tools/convert_gguf.py MODEL.gguf FOLDER

Weights are dequantized by the `gguf` package, exactly: float32 holds every value of every quantized type. GGUF differs
from the published checkpoints in more than names: the rows of Llama's q and k stand in the order in which adjacent
entries rotate, and Gemma's norms have the 1 added. Both are put back. What is not understood is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer that all architectures here have: name in GGUF, name in the Hugging Face layout."""

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside the layers."""

LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

GEMMA3_27B_LAYERS = 62
"""The only Gemma 3 whose scores are not scaled by the head dim. GGUF does not state the scale; llama.cpp takes it from
the number of layers, too."""

Metadata = Mapping[str, Any]


class ConversionError(Exception):
    """The file cannot be converted; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """How an architecture is written in GGUF.

    Args:
        config: metadata -> entries of config.json besides those that all architectures have.
        modules: modules of a layer: name in GGUF, name in the Hugging Face layout.
        interleaved: whether rows of q and k are in the order in which adjacent entries rotate.
        norms_add: what GGUF has added to the weights of norms.
    """

    config: Callable[[Metadata], dict[str, Any]]
    modules: Mapping[str, str]
    interleaved: bool = False
    norms_add: float = 0.0


def llama_config(meta: Metadata) -> dict[str, Any]:
    """Entries of a Llama's config."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": head_dim(meta),
        "rope_theta": decimal(meta.get("llama.rope.freq_base", 10000.0)),
    }


def gemma3_config(meta: Metadata) -> dict[str, Any]:
    """Entries of a Gemma 3's config (its text model): every sixth layer attends to all tokens."""
    heads, layers = meta["gemma3.attention.head_count"], meta["gemma3.block_count"]
    scalar = meta["gemma3.embedding_length"] // heads if layers == GEMMA3_27B_LAYERS else head_dim(meta)
    whole = {"rope_type": "default", "rope_theta": decimal(meta.get("gemma3.rope.freq_base", 1e6))}
    if (kind := meta.get("gemma3.rope.scaling.type", "none")) != "none":
        whole |= {"rope_type": kind, "factor": decimal(meta["gemma3.rope.scaling.factor"])}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim(meta),
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta["gemma3.attention.sliding_window"],
        "layer_types": [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


ARCHITECTURES = {
    "llama": Architecture(llama_config, {**MODULES, "ffn_norm": "post_attention_layernorm"}, interleaved=True),
    "gemma3": Architecture(
        gemma3_config,
        {
            **MODULES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_add=1.0,
    ),
}


def decimal(value: float) -> float:
    """The shortest decimal number that is this float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def head_dim(meta: Metadata) -> int:
    """Entries a head."""
    name = meta["general.architecture"]
    stated = meta.get(f"{name}.attention.key_length")
    return int(stated or meta[f"{name}.embedding_length"] // meta[f"{name}.attention.head_count"])


def make_config(meta: Metadata, vocab: int, tied: bool) -> dict[str, Any]:
    """Make the entries of config.json.

    Args:
        meta: the file's metadata.
        vocab: rows of the embedding.
        tied: whether the embedding is the output head, too.

    Raises:
        ConversionError: an entry is missing.
    """
    name = meta["general.architecture"]
    try:
        return {
            **ARCHITECTURES[name].config(meta),
            "vocab_size": vocab,
            "hidden_size": meta[f"{name}.embedding_length"],
            "intermediate_size": meta[f"{name}.feed_forward_length"],
            "num_hidden_layers": meta[f"{name}.block_count"],
            "num_attention_heads": meta[f"{name}.attention.head_count"],
            "num_key_value_heads": meta.get(f"{name}.attention.head_count_kv", meta[f"{name}.attention.head_count"]),
            "max_position_embeddings": meta[f"{name}.context_length"],
            "rms_norm_eps": decimal(meta[f"{name}.attention.layer_norm_rms_epsilon"]),
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
            **special_tokens(meta),
        }
    except KeyError as error:
        raise ConversionError(f"The file's metadata lack {error}.") from error


def special_tokens(meta: Metadata) -> dict[str, int]:
    """The ids of special tokens, as config.json and generation_config.json have them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {short: meta.get(f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    return {f"{short}_token_id": int(value) for short, value in found.items() if value is not None}


def rename_tensor(name: str, architecture: Architecture) -> str:
    """The name of a tensor in the Hugging Face layout.

    Raises:
        ConversionError: it belongs to nothing that is known.
    """
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE and kind == "weight":
        return f"{OUTSIDE[module]}.weight"
    found = LAYER.fullmatch(name)
    if found is None or found[2] not in architecture.modules:
        raise ConversionError(f"The tensor {name!r} has no place in this architecture as this script knows it.")
    return f"model.layers.{found[1]}.{architecture.modules[found[2]]}.{found[3]}"


def restore_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put a head's rows back in the order of first and second halves, in which entries half a head apart rotate.

    Args:
        rows: `[heads * d, ...]`; a head's rows are 0, d/2, 1, d/2 + 1, ...
        heads: number of heads.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model to a new folder; after a failure there is none.

    Raises:
        ConversionError: the file is no GGUF file that is understood, or the folder exists.
    """
    if folder.exists():
        raise ConversionError(f"{folder} exists: name another folder, or remove it.")
    import gguf
    from transformers import AutoTokenizer

    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError) as error:
        raise ConversionError(f"{file} cannot be read as GGUF: {error}.") from error
    meta = {key: field.contents() for key, field in reader.fields.items()}
    name = meta.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConversionError(f"Architecture {name!r} is not known; there are {', '.join(ARCHITECTURES)}.")
    architecture = ARCHITECTURES[name]
    heads = {"attn_q": meta[f"{name}.attention.head_count"]}
    heads["attn_k"] = meta.get(f"{name}.attention.head_count_kv", heads["attn_q"])
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if architecture.interleaved and part in heads:
            values = restore_rows(values, heads[part])
        if part.endswith("norm"):
            values = values - np.float32(architecture.norms_add)
        tensors[rename_tensor(tensor.name, architecture)] = torch.from_numpy(np.ascontiguousarray(values))
    vocab = tensors["model.embed_tokens.weight"].shape[0]
    config = make_config(meta, vocab, tied="lm_head.weight" not in tensors)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        made = Path(parent) / folder.name
        made.mkdir()
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (made / "generation_config.json").write_text(json.dumps(special_tokens(meta), indent=2) + "\n")
        # From the file alone: the tokenizer's class, its merges, its chat template.
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        shutil.move(made, folder)


def main() -> int:
    """Convert the file that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("folder", type=Path, help="a new folder")
    options = parser.parse_args()
    try:
        convert(options.file, options.folder)
    except ConversionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
