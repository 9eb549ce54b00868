"""NVFP4 and MXFP8 as ModelOpt and compressed-tensors write them, beside the values that they stand for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.errors import InferplaneWarning
from inferplane.ops import encode
from tests.e2e.checkpoints import PROMPT
from tests.e2e.test_mxfp4 import VALUES
from tests.e2e.tiny_models import llama_config, random_model

EXCLUDED = "model.layers.0.self_attn"


def nvfp4(weight):
    """A weight `[N, K]` as ModelOpt stores it, by suffix; and its values."""
    q = encode(weight, "nvfp4")
    factor = weight.abs().max() / (6 * 448)
    codes = (q.data.int().abs()[..., None] == torch.tensor(VALUES)).int().argmax(-1) + 8 * (q.data < 0)
    scale = (2 * q.scale / factor).to(torch.float8_e4m3fn)
    parts = {"": (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), "_scale": scale, "_scale_2": factor}
    return parts, q.data.float() * (scale.float() * factor / 2).repeat_interleave(16, 1)


def mxfp8(weight):
    """A weight `[N, K]` as compressed-tensors stores it, by suffix; and its values."""
    q = encode(weight, "mxfp8")
    return {"": q.data, "_scale": (torch.log2(q.scale).round() + 127).to(torch.uint8)}, q.dequantize()


ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
GROUPS = {"weights": {**ACTIVATIONS, "dynamic": False}, "input_activations": ACTIVATIONS, "targets": ["Linear"]}
CASES = {
    "nvfp4": (
        nvfp4,
        {"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", f"{EXCLUDED}*"],
        }},
    ),
    "mxfp8": (
        mxfp8,
        {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"group_0": GROUPS},
         "ignore": ["lm_head", f"re:{EXCLUDED}.*"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("format", CASES)
def test_a_checkpoint_computes_with_its_values(format, tmp_path):
    quantize, settings = CASES[format]
    folder, twin = tmp_path / "quantized", tmp_path / "twin"
    for path in (folder, twin):
        random_model(llama_config(tie_word_embeddings=False)).save_pretrained(path)
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight") and EXCLUDED not in name:
            parts, values[name] = quantize(tensor)
            tensors |= {name + suffix: part for suffix, part in parts.items()}
            if format == "nvfp4":
                tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    save_file({n: t.contiguous() for n, t in values.items()}, twin / "model.safetensors", {"format": "pt"})
    if format == "nvfp4":
        (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    else:
        entries = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**entries, "quantization_config": settings}))
    with LLM(twin, device="cpu", dtype="float32") as llm:
        want = llm.logits(PROMPT)[0]
    with pytest.warns(InferplaneWarning, match="activations are quantized .* That is not applied"):
        llm = LLM(folder, device="cpu", dtype="float32")
    with llm:
        assert not llm.runner.loaded.unused
        assert f"of format {format}" in llm.explain_text(), "that its weights are dequantized"
        assert torch.allclose(llm.logits(PROMPT)[0], want, atol=1e-5 * want.abs().max())
