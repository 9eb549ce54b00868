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
GEMMA_3_1B: dict[str, Any] = {
    "kind": "Gemma3",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
}
GPT_OSS_20B: dict[str, Any] = {
    "kind": "GptOss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 12,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}
"""6 of 24 layers with 12 of 32 experts, or transformers, which dequantizes MXFP4, takes 40 GB; four are read for a
token, as in the whole model."""
QWEN3_5_0_8B: dict[str, Any] = {
    "kind": "Qwen3_5",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
}
"""Three layers of four keep states."""
SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "gemma-3-1b": GEMMA_3_1B,
    "gpt-oss-20b": GPT_OSS_20B,
    "qwen3.5-0.8b": QWEN3_5_0_8B,
    "small": {**QWEN3_0_6B, "num_hidden_layers": 6, "vocab_size": 32000},
}
MXFP4_BITS = 4.25
BITS = {"bf16": 16.0, "int8": 8.125, "int4": 4.5, "mxfp4": MXFP4_BITS, "nvfp4": 5.0, "a8w8": 8.0, "a8w4": 4.5}
"""Bits a weight with its scales: groups of 128 columns for int8, of 32 for int4 and a8w4, of 16 for nvfp4, scales of
16 bits; for a8w8 rows, whose scales are not counted."""
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
"""Configs that are not called as the model is."""


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
    """Write the checkpoint, unless it is there: bfloat16, gpt-oss's experts in MXFP4; embedding and head tied, where
    the sizes say nothing else."""
    if (folder / "config.json").exists():
        return
    import torch
    import transformers

    sizes = {"tie_word_embeddings": True, **SHAPES[shape]}
    kind = sizes.pop("kind")
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    make = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))
    config = make(**sizes, **ids, max_position_embeddings=4096)
    # Experts of gpt-oss are written by `save_experts`; the model has small ones in their place.
    drawn = make(**{**sizes, "intermediate_size": 32}, **ids) if kind == "GptOss" else config
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        getattr(transformers, f"{kind}ForCausalLM")(drawn).save_pretrained(folder, max_shard_size="100GB")
    finally:
        torch.set_default_dtype(before)
    if kind == "GptOss":
        save_experts(folder, config)


def save_experts(folder: Path, config: Any) -> None:
    """Put random MXFP4 experts of the config's sizes in the checkpoint, in gpt-oss's own layout."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if ".experts." not in key}
    experts, width, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    for i in range(config.num_hidden_layers):
        for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            at, groups = f"model.layers.{i}.mlp.experts.{name}", (experts, rows, columns // 32)
            tensors[f"{at}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{at}_scales"] = torch.randint(118, 122, groups, dtype=torch.uint8)  # entries of about 0.02
            tensors[f"{at}_bias"] = torch.zeros(experts, rows, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    config.architectures, config.dtype = ["GptOssForCausalLM"], torch.bfloat16
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    config.save_pretrained(folder)


def decode_bytes(shape: str, precision: str) -> float:
    """Weight bytes that one token reads: all linear layers of which it takes part, and the head. Experts of gpt-oss
    count as they are stored, although transformers reads dequantized ones."""
    s = SHAPES[shape]
    width, layers = s["hidden_size"], s["num_hidden_layers"]
    gated = 3 * width * s["intermediate_size"]
    stored = 0.0
    if "num_local_experts" in s:
        stored = layers * s["num_experts_per_tok"] * gated * MXFP4_BITS / 8
        gated = s["num_local_experts"] * width  # the router
    if "kv_lora_rank" in s:
        heads, latent, rope = s["num_attention_heads"], s["kv_lora_rank"], s["qk_rope_head_dim"]
        q, v = s["qk_nope_head_dim"], s["v_head_dim"]
        attention = width * (heads * (q + rope) + latent + rope + heads * v) + latent * heads * (q + v)
        experts = s["num_experts_per_tok"] + s["n_shared_experts"]
        moe = 3 * width * s["moe_intermediate_size"] * experts + width * s["n_routed_experts"]
        dense = s["first_k_dense_replace"]
        weights = layers * attention + dense * gated + (layers - dense) * moe
    elif "linear_num_key_heads" in s:
        rows = (3 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"]  # with gates
        keys, values = (s[f"linear_num_{x}_heads"] * s[f"linear_{x}_head_dim"] for x in ("key", "value"))
        recurrent = 2 * keys + 3 * values + 2 * s["linear_num_value_heads"]
        weights = layers // 4 * (rows + 3 * recurrent) * width + layers * gated
    else:
        rows = (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"]
        weights = layers * (rows * width + gated)
    head = BITS["bf16" if precision == "bf16" else "int8"]  # in 8 bits beside weights of 4, too
    return (weights * BITS[precision] + s["vocab_size"] * width * head) / 8 + stored
