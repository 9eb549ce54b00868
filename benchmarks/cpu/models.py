"""Random-weight checkpoints of true shapes, which all peers read, and the bytes of weights a token takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

QWEN3_0_6B: dict[str, Any] = {
    "kind": "Qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
LLAMA_3_2_1B: dict[str, Any] = {
    "kind": "Llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "small": {**QWEN3_0_6B, "num_hidden_layers": 6, "vocab_size": 32000},
}
BITS = {"bf16": 16.0, "int8": 8.125, "int4": 4.5}
"""Bits a weight with its scales: groups of 128 columns for int8, of 32 for int4, scales of 16 bits."""


def save(shape: str, folder: Path) -> None:
    """Write the checkpoint, unless it is there: bfloat16, embedding and head tied."""
    if (folder / "config.json").exists():
        return
    import torch
    import transformers

    sizes = dict(SHAPES[shape])
    kind = sizes.pop("kind")
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **ids, tie_word_embeddings=True, max_position_embeddings=4096
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)


def decode_bytes(shape: str, precision: str) -> float:
    """Weight bytes that one token reads: all linear layers, and the head."""
    s = SHAPES[shape]
    heads = (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"] * s["hidden_size"]
    layer = heads + 3 * s["hidden_size"] * s["intermediate_size"]
    return (s["num_hidden_layers"] * layer + s["vocab_size"] * s["hidden_size"]) * BITS[precision] / 8
