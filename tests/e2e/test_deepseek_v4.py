"""DeepSeek-V4's files as they are published, against transformers' model with the values that they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from tests.e2e.published_v4 import publish
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import logits_of, prompts
from tests.families.cases import make

SIZES = {"hidden_size": 160, "q_lora_rank": 136, "moe_intermediate_size": 96, "mlp_layer_types": None}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2, "only_if_faster": False}


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8_and_mxfp4"])
def test_published_files(tmp_path, quantized):
    with torch.no_grad():
        model = publish(tmp_path, "all", quantized=quantized, compress_rates=None, **SIZES)
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=3) as llm:
        assert not llm.runner.loaded.unused
        if quantized:
            formats = llm.runner.model.formats()
            assert {"fp8_block", "mxfp4"} <= formats
        many = prompts(llm.engine.vocab, (3, 4, 127, 128, 129, 300))
        for ids, got in zip(many, llm.logits(many, chunk_tokens=33)):
            assert error(got, logits_of(model, ids)) <= FLOAT32


def test_every_boundary_of_compression(tmp_path):
    """Prompts around the rates of 4 and 128 and the number of chosen entries, in chunks that divide none of them."""
    model = make("deepseek_v4", "yarn", tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=3) as llm:
        many = prompts(llm.engine.vocab, (3, 4, 5, 95, 97, 127, 128, 129, 257, 400))
        for chunk_tokens in (1000, 37):
            for ids, got in zip(many, llm.logits(many, chunk_tokens=chunk_tokens)):
                assert error(got, logits_of(model, ids)) <= FLOAT32


def add_prediction_layer(folder, config):
    """Add a random prediction layer under its published names, with repeated embedding and head."""
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    width, streams, below = config.hidden_size, config.hc_mult, "mtp.0."
    random = lambda *shape: torch.randn(*shape, generator=draw) / math.sqrt(shape[-1])  # noqa: E731
    for name in [n for n in tensors if n.startswith("layers.0.") and not n.endswith("tid2eid")]:
        noise = random(*tensors[name].shape)
        tensors[below + name.removeprefix("layers.0.")] = 1 + noise if "norm" in name else noise
    tensors[f"{below}ffn.gate.bias"] = random(config.n_routed_experts)
    tensors |= {f"{below}{name}.weight": 1 + random(width) for name in ("enorm", "hnorm", "norm")}
    tensors |= {f"{below}{name}.weight": random(width, width) for name in ("e_proj", "h_proj")}
    heads = {"fn": random(streams, streams * width), "base": random(streams), "scale": random(1)}
    tensors |= {f"{below}hc_head_{name}": tensor for name, tensor in heads.items()}
    tensors |= {f"{below}emb.tok_emb.weight": tensors["embed.weight"].clone()}
    tensors |= {f"{below}head.weight": tensors["head.weight"].clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_drafts_of_the_prediction_layer_change_no_text(tmp_path):
    """Also if it is loaded beside the model while it runs, and released."""
    with torch.no_grad():
        model = publish(tmp_path, "all", quantized=False, num_nextn_predict_layers=1, compress_rates=None, **SIZES)
    add_prediction_layer(tmp_path, model.config)
    greedy, options = SamplingParams(max_tokens=40, temperature=0), {"max_num_seqs": 3, "max_num_batched_tokens": 48}
    with LLM(tmp_path, device="cpu", dtype="float32", **options) as llm:
        assert not llm.runner.loaded.unused
        many = prompts(llm.engine.vocab, (5, 40, 17))
        want = [result.token_ids for result in llm.generate(many, greedy)]
        llm.set_speculation(DRAFTS)
        assert [result.token_ids for result in llm.generate(many, greedy)] == want
        assert llm.runner.model.returns_streams
        llm.set_speculation(None)
        assert [result.token_ids for result in llm.generate(many, greedy)] == want
    with LLM(tmp_path, device="cpu", dtype="float32", speculative_config=DRAFTS, **options) as llm:
        assert not llm.runner.loaded.unused
        assert [result.token_ids for result in llm.generate(many, greedy)] == want
