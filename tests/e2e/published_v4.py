"""DeepSeek-V4 as it is published: names and config of its files, FP8 blocks and MXFP4 experts with powers of two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inferplane.ops import encode
from tests.e2e.tiny_models import random_model
from tests.families.cases import config_of

NAMES = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.compressor\.indexer\.scorer\.weights_proj", ".indexer.weights_proj"),
    (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"(compressor)\.kv_norm", r"\1.norm"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.(q_a|q_b|kv|gate|o_a|o_b)_proj\.", r".w\1."),
)
"""Names of transformers' modules -> published ones, one after the other."""
FP8 = re.compile(r".*\.(?:w[123]|wq_a|wq_b|wkv|wo_a|wo_b)\.weight")
RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def publish(folder: Path, case: str, *, quantized: bool, **changes: Any) -> Any:
    """Write a random model as it is published.

    Args:
        folder: of the files.
        case: of `deepseek_v4` in tests/families. changes: of its config.
        quantized: whether layers are in FP8, and experts in MXFP4.

    Returns:
        transformers' model with the values of the files.
    """
    config = config_of("deepseek_v4", case, **changes)
    model = random_model(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            tensors |= _publish_experts(name, tensor, quantized)
            continue
        for pattern, published in NAMES:
            name = re.sub(pattern, published, name)
        fits = quantized and FP8.fullmatch(name) and ".compressor." not in name
        tensors |= _publish_fp8(name, tensor) if fits else {name: tensor.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(publish_config(config, quantized)))
    return model


def publish_config(config: Any, quantized: bool) -> dict[str, Any]:
    """A config's entries in the spelling of published files."""
    entries = {k: v for k, v in config.to_dict().items() if v is not None}
    main, compress = (entries["rope_parameters"][kind] for kind in ("main", "compress"))
    rates = {**RATIOS, **{kind: rate for kind, rate in config.compress_rates.items() if rate not in (4, 128)}}
    ratios = [rates[kind] for kind in config.layer_types]
    for name in ("rope_parameters", "layer_types", "mlp_layer_types", "partial_rotary_factor", "compress_rates"):
        entries.pop(name, None)
    entries["rope_theta"], entries["compress_rope_theta"] = main["rope_theta"], compress["rope_theta"]
    if compress["rope_type"] != "default":
        own = {k: v for k, v in compress.items() if k not in ("rope_theta", "partial_rotary_factor")}
        entries["rope_scaling"] = {"type": own.pop("rope_type"), **own}
    hashed = sum(kind == "hash_moe" for kind in config.mlp_layer_types)
    entries |= {"compress_ratios": [*ratios, 0], "num_hash_layers": hashed, "qk_rope_head_dim": config.qk_rope_head_dim}
    entries |= {"architectures": ["DeepseekV4ForCausalLM"], "topk_method": "noaux_tc", "norm_topk_prob": True}
    if quantized:
        settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
        entries |= {"expert_dtype": "fp4", "quantization_config": {**settings, "activation_scheme": "dynamic"}}
    return entries


def _publish_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in FP8 with a power of two a block; it gets the values that these stand for."""
    scale = torch.exp2(torch.log2(encode(tensor, "fp8_block").scale).ceil())
    wide = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
    data = (tensor / wide).to(torch.float8_e4m3fn)
    tensor.copy_(data.float() * wide)
    return {name: data, f"{name.removesuffix('weight')}scale": scale.to(torch.float8_e8m0fnu)}


def _publish_experts(name: str, tensor: torch.Tensor, quantized: bool) -> dict[str, torch.Tensor]:
    """A stack of experts as single matrices, in MXFP4 with the values that it gets, or as they are."""
    from tests.e2e.test_mxfp4 import pack

    before = re.sub(r"^model\.(layers\.\d+)\.mlp\.experts\..*", r"\1.ffn.experts", name)
    parts = ("w1", "w3") if "gate_up" in name else ("w2",)
    out = {}
    if not quantized:
        stacks = dict(zip(parts, tensor.chunk(len(parts), 1)))
        return {f"{before}.{e}.{p}.weight": rows[e].clone() for p, rows in stacks.items() for e in range(len(rows))}
    blocks, powers, values = pack(tensor)
    tensor.copy_(values)
    for part, rows, scales in zip(parts, blocks.flatten(2).chunk(len(parts), 1), powers.chunk(len(parts), 1)):
        for e in range(tensor.shape[0]):
            out[f"{before}.{e}.{part}.weight"] = rows[e].clone().view(torch.int8)
            out[f"{before}.{e}.{part}.scale"] = scales[e].clone().view(torch.float8_e8m0fnu)
    return out
