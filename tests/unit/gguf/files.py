"""Small GGUF files: every tensor type, made by the `gguf` package's writer from random blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from inferplane.gguf.types import PLAIN, READ

LLAMA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 512,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
TYPES = [kind.name for kind in READ.values()]
SHAPES = {
    "token_embd.weight": (32, 256),
    "output_norm.weight": (256,),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_k.weight": (128, 256),
    "blk.0.attn_v.weight": (128, 256),
    "blk.0.attn_output.weight": (256, 256),
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.ffn_gate.weight": (256, 256),
    "blk.0.ffn_up.weight": (256, 256),
    "blk.0.ffn_down.weight": (256, 256),
}
"""The tensors of a Llama of one layer, in torch's order."""


def random_values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Float32 numbers of both signs."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.1


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bytes of packed rows whose values are finite: uint8 `[..., bytes a row]`. Of plain types the values."""
    values = random_values(shape, seed)
    if kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16)
    number = gguf.GGMLQuantizationType[kind]
    if kind == "BF16":
        return gguf.quants.quantize(values, number)
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // block, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:  # scales in float16: 2**-7 to 2**-4, so that no value overflows
        raw[..., at + 1] = 0x20 + (raw[..., at + 1] & 0x0F)
    if kind == "MXFP4":
        raw[..., 0] = 120 + (raw[..., 0] & 7)
    return raw.reshape(*shape[:-1], -1)


SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
}
"""Positions of a block's scales in float16."""


def write(
    path: Path,
    tensors: dict[str, tuple[str, np.ndarray]],
    entries: dict[str, Any] | None = None,
    architecture: str = "llama",
    others: dict[str, Any] | None = None,
) -> Path:
    """Write a file.

    Args:
        path: of the file.
        tensors: name -> type, and values or packed bytes.
        entries: of the metadata, named as below the architecture; None: those of `LLAMA`.
        architecture: of the model.
        others: further metadata by whole names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        **{f"{architecture}.{key}": value for key, value in (LLAMA if entries is None else entries).items()},
        **(others or {}),
    }.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (kind, data) in tensors.items():
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama(kind: str = "Q4_K", plain: str = "F32") -> dict[str, tuple[str, np.ndarray]]:
    """The tensors of a Llama of one layer, its matrices in one type."""
    assert plain in PLAIN
    return {
        name: (form, random_blocks(form, shape, seed))
        for seed, (name, shape) in enumerate(SHAPES.items())
        for form in (kind if len(shape) > 1 else plain,)
    }
