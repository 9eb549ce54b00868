"""gpt-oss's own layout: MXFP4 experts in stacks, against transformers' model with the values that they stand for."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.ops import encode
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import logits_of, prompts, random_model
from tests.families.cases import config_of

VALUES = (0, 1, 2, 3, 4, 6, 8, 12)


def pack(weight):
    """A weight `[E, N, K]` as MXFP4: blocks `[E, N, K / 32, 16]`, scales `[E, N, K / 32]`, and the values."""
    q = encode(weight, "mxfp4")
    magnitudes = torch.tensor(VALUES)
    codes = (q.data.int().abs()[..., None] == magnitudes).int().argmax(-1) + 8 * (q.data < 0)
    low, high = codes.unflatten(-1, (-1, 16, 2)).unbind(-1)
    exponents = torch.log2(2 * q.scale).round().int() + 127
    return (low + 16 * high).to(torch.uint8), exponents.to(torch.uint8), q.dequantize()


def test_experts_in_mxfp4(tmp_path):
    config = config_of("gpt_oss", "yarn", intermediate_size=96, num_hidden_layers=2)
    model = random_model(config)
    packed = {}
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(layer.mlp.experts, name)
                blocks, scales, values = pack(weight.transpose(1, 2))
                weight.copy_(values.transpose(1, 2))
                stored = f"model.layers.{i}.mlp.experts.{name}"
                packed |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    assert len(plain) == len(tensors) - 4
    save_file({**plain, **packed}, tmp_path / "model.safetensors", {"format": "pt"})
    entries = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**entries, "quantization_config": quantization}))
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=3) as llm:
        assert not llm.runner.loaded.unused
        assert "mxfp4" in llm.explain_text(), "that no kernel takes the format"
        many = prompts(llm.engine.vocab, (70, 9))
        for ids, got in zip(many, llm.logits(many, chunk_tokens=33)):
            assert error(got, logits_of(model, ids)) <= FLOAT32
