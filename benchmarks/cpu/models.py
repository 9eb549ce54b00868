"""Random-weight checkpoints of true shapes, which all peers read, and the bytes of weights a token takes."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "kind": "DeepseekV2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 12,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
"""12 of 64 experts, or it takes 31 GB; six and the shared ones are read for a token, as in the whole model."""
SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "small": {**QWEN3_0_6B, "num_hidden_layers": 6, "vocab_size": 32000},
}
BITS = {"bf16": 16.0, "int8": 8.125, "int4": 4.5}
"""Bits a weight with its scales: groups of 128 columns for int8, of 32 for int4, scales of 16 bits."""


def add_arguments(parser: argparse.ArgumentParser, shape: str, turns: int | None = None) -> None:
    """`--shape`, `--folder`, and where turns are taken `--turns` and `--json`; with their defaults."""
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept; left out: a temporary folder")
    if turns is not None:
        parser.add_argument("--turns", type=int, default=turns)
        parser.add_argument("--json", metavar="FILE", help="also write the results here")


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint that `add_arguments` names, written if it was not; a temporary one is removed."""
    with tempfile.TemporaryDirectory() as made:
        folder = (args.folder or Path(made)) / args.shape
        save(args.shape, folder)
        yield folder


def save(shape: str, folder: Path) -> None:
    """Write the checkpoint, unless it is there: bfloat16; embedding and head tied, where the sizes say nothing else."""
    if (folder / "config.json").exists():
        return
    import torch
    import transformers

    sizes = {"tie_word_embeddings": True, **SHAPES[shape]}
    kind = sizes.pop("kind")
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes, **ids, max_position_embeddings=4096)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)


def decode_bytes(shape: str, precision: str) -> float:
    """Weight bytes that one token reads: all linear layers of which it takes part, and the head."""
    s = SHAPES[shape]
    width, layers = s["hidden_size"], s["num_hidden_layers"]
    gated = 3 * width * s["intermediate_size"]
    if "kv_lora_rank" in s:
        heads, latent, rope = s["num_attention_heads"], s["kv_lora_rank"], s["qk_rope_head_dim"]
        q, v = s["qk_nope_head_dim"], s["v_head_dim"]
        attention = width * (heads * (q + rope) + latent + rope + heads * v) + latent * heads * (q + v)
        experts = s["num_experts_per_tok"] + s["n_shared_experts"]
        moe = 3 * width * s["moe_intermediate_size"] * experts + width * s["n_routed_experts"]
        dense = s["first_k_dense_replace"]
        weights = layers * attention + dense * gated + (layers - dense) * moe
    else:
        rows = (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"]
        weights = layers * (rows * width + gated)
    return (weights + s["vocab_size"] * width) * BITS[precision] / 8
