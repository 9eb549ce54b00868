"""A random-weight checkpoint as a GGUF file, for llama.cpp: Q4_0 and Q8_0 in every matrix, the embedding too; experts
in MXFP4 as they are stored.

    python benchmarks/cpu/gguf_file.py FOLDER FILE bf16|int8|int4      # with a Python that has gguf and torch

Rows of q and k keep the checkpoint's order, which llama.cpp's Llama reads otherwise: times are the same, texts are not.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors import safe_open

TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
CLAMPED_EXPERTS = r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales|bias)"
ARCHITECTURES = {
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
}


def sizes(writer, config):
    """The header: what the architecture needs, and no vocabulary."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if "kv_lora_rank" in config:
        latent_and_experts(writer, config)
    else:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(int(head * partial_rotation(config)))
    if "linear_num_key_heads" in config:
        states(writer, config)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def partial_rotation(config):
    """The share of a head's entries that are rotated."""
    return (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1)


def states(writer, config):
    """Qwen3.5's part of the header: gated delta rules, and text's positions in three equal parts."""
    pairs = int(config["head_dim"] * partial_rotation(config)) // 2
    writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def as_states(tensors):
    """Qwen3.5's recurrent layers as llama.cpp stores them: a convolution is a matrix, decays are negative."""
    for key, tensor in tensors:
        if key.endswith("conv1d.weight"):
            tensor = tensor.float().squeeze(1)
        elif key.endswith("A_log"):
            tensor = -tensor.float().exp()
        yield key.replace(".dt_bias", ".dt_proj.bias"), tensor


def latent_and_experts(writer, config):
    """DeepSeek V2's part of the header: attention over latents as one key head, and experts."""
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def stored(folder):
    """Every tensor of a checkpoint by its name."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                yield key, tensors.get_tensor(key)


def as_mxfp4(blocks, scales):
    """Experts' blocks and scales as llama.cpp's: 32 entries are a scale, then entry i beside entry i + 16."""
    entries = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    low, high = entries.split(16, -1)
    return torch.cat((scales[..., None], low | high << 4), -1).flatten(-2)


def as_clamped_experts(tensors):
    """gpt-oss's experts, of which rows of gate and up alternate, by llama.cpp's names: `(name, bytes)` of MXFP4, and of
    biases `(name, tensor)`; other tensors as they are."""
    parts = {}
    for key, tensor in tensors:
        if not (
            found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales|bias)", key)
        ):
            yield key, tensor
            continue
        layer, name, kind = found.groups()
        if kind != "bias":
            parts.setdefault((layer, name), {})[kind] = tensor
            if len(parts[layer, name]) < 2:
                continue
            tensor = as_mxfp4(**parts.pop((layer, name)))
        ending = "bias" if kind == "bias" else "weight"
        each = {"down": tensor} if name == "down" else {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
        for part, rows in each.items():
            yield f"blk.{layer}.ffn_{part}_exps.{ending}", rows.contiguous()


def as_stacked(tensors, config):
    """Experts of a layer in one tensor, and the products of latents apart for keys (transposed) and values."""
    parts = {}
    for key, tensor in tensors:
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", key):
            rows = parts.setdefault(f"{found[1]}.{found[3]}.weight", {})
            rows[int(found[2])] = tensor
            if len(rows) == config["n_routed_experts"]:
                name = f"{found[1]}.{found[3]}.weight"
                yield name, torch.stack([row for _, row in sorted(parts.pop(name).items())])
        elif key.endswith("kv_b_proj.weight"):
            heads = tensor.view(config["num_attention_heads"], -1, tensor.shape[-1])
            k, v = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
            yield key.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2).contiguous()
            yield key.replace("kv_b_proj", "v_b_proj"), v.contiguous()
        else:
            yield key, tensor
    if parts:
        raise SystemExit(f"experts missing: {sorted(parts)}")


def main():
    """Command line."""
    folder, file, precision = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    sizes(writer, config)
    for key, tensor in as_clamped_experts(as_stacked(as_states(stored(folder)), config)):
        name = key if key.startswith("blk.") else names.get_name(key, (".weight", ".bias"))
        if key.endswith(".sinks"):
            name = names.get_name(key) + ".weight"
        if tensor.dtype is torch.uint8:
            writer.add_tensor(name, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif tensor.dim() == 1 or key.endswith(("conv1d.weight", "mlp.gate.weight", "mlp.router.weight", "exps.bias")):
            writer.add_tensor(name, tensor.float().numpy())
        elif precision == "bf16":
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=TYPES["bf16"])
        else:
            values = quantize(tensor.float().numpy().astype(np.float32), TYPES[precision])
            writer.add_tensor(name, values, raw_dtype=TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
