"""A random-weight checkpoint as a GGUF file, for llama.cpp: Q4_0 and Q8_0 in every matrix, the embedding too.

    python benchmarks/cpu/gguf_file.py FOLDER FILE bf16|int8|int4      # with a Python that has gguf and torch

Rows of q and k keep the checkpoint's order, which llama.cpp's Llama reads otherwise: times are the same, texts are not.
"""

from __future__ import annotations

import json
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
ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}


def sizes(writer, config):
    """The header: what the architecture needs, and no vocabulary."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def main():
    """Command line."""
    folder, file, precision = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    sizes(writer, config)
    with safe_open(folder / "model.safetensors", "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 - not a mapping
            tensor = stored.get_tensor(key)
            name = names.get_name(key, (".weight", ".bias"))
            if tensor.dim() == 1:
                writer.add_tensor(name, tensor.float().numpy())
            elif precision == "bf16":
                raw = tensor.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(name, raw, raw_dtype=TYPES["bf16"])
            else:
                values = quantize(tensor.float().numpy().astype(np.float32), TYPES[precision])
                writer.add_tensor(name, values, raw_dtype=TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
