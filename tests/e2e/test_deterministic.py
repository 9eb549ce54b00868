"""deterministic=True: log-probabilities in bfloat16 are the same to the last bit, whatever else is in a step.

On native kernels and on torch's in tiles of equal shape; and the comparison is shown to find a kernel that only claims
to be batch-invariant.
"""

import random
from dataclasses import replace

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane_cpu import backend
from inferplane_cpu.native import native
from tests.e2e.tiny_models import deepseek_config, llama_config, prompts, random_model

LENGTHS = (40, 7, 23, 1, 33, 12, 70, 18) * 4
MODELS = {
    "gqa": lambda: llama_config(hidden_size=96, num_attention_heads=6),
    "gqa_odd": lambda: llama_config(hidden_size=90, num_attention_heads=5, num_key_value_heads=1, head_dim=22),
    "qwen3": lambda: small("Qwen3Config", head_dim=32),
    "window": lambda: small("MistralConfig", sliding_window=20),
    "mla_moe": lambda: deepseek_config(num_hidden_layers=2),
    "long_rows": lambda: llama_config(hidden_size=512, num_attention_heads=8, intermediate_size=528),
    "long_rows_moe": lambda: deepseek_config(
        num_hidden_layers=2, hidden_size=512, moe_intermediate_size=512, q_lora_rank=512, v_head_dim=128
    ),
}
TORCH = {op: "torch_batch_invariant" for op in ("linear", "lm_head", "attention")} | {"decoder_layer": "decomposition"}
TORCH_MLA = {op: "torch_batch_invariant" for op in ("linear", "lm_head", "mla_absorbed", "mla_expanded", "moe_experts")}
TORCH_MLA |= {"decoder_layer": "decomposition"}


def small(kind, **changes):
    import transformers

    sizes = llama_config(**changes).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return getattr(transformers, kind)(**{name: sizes[name] for name in kept}, **changes)


STEPS = (
    {"max_num_seqs": 32},
    {"max_num_seqs": 3},
    {"max_num_seqs": 8, "max_num_batched_tokens": 5},
    {"max_num_seqs": 5, "max_num_batched_tokens": 17},
    {"max_num_seqs": 32, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, config in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        random_model(config(), seed=5).to(torch.bfloat16).save_pretrained(made[name])
    return made


def opened(folder, **options):
    return LLM(folder, device="cpu", dtype="bfloat16", max_model_len=128, deterministic=True, **options)


def scored(results):
    """Everything that a model said, as data: tokens, and log-probabilities of prompt and continuation."""
    return [(r.token_ids, r.logprobs, r.prompt_logprobs) for r in results]


def asked(count):
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    return prompts(160, LENGTHS[:count], seed=4), [params] * count


def differing(folder, steps, count, ops=None):
    """Prompts whose scores depend on the step: each alone in one chunk against all of them under `steps`."""
    every, params = asked(count)
    with opened(folder, ops=ops, enable_prefix_caching=False) as llm:
        alone = [scored(llm.generate([p], q))[0] for p, q in zip(every, params, strict=True)]
    wrong = set()
    for options in steps:
        order = list(range(count))
        random.Random(count).shuffle(order)
        with opened(folder, ops=ops, **options) as llm:
            got = scored(llm.generate([every[i] for i in order], [params[i] for i in order]))
        wrong |= {i for i, said in zip(order, got, strict=True) if said != alone[i]}
    return wrong


@pytest.mark.skipif(native().library is None, reason=f"not run: {native().reason}")
@pytest.mark.parametrize("model", MODELS)
def test_native_kernels_give_the_same_bits(model, folders):
    assert not differing(folders[model], STEPS, 32)


@pytest.mark.parametrize("model", MODELS)
def test_torch_kernels_give_the_same_bits(model, folders):
    ops = TORCH_MLA if model.endswith("moe") else TORCH
    assert not differing(folders[model], STEPS[2:4], 8, ops)


@pytest.mark.skipif(native().library is None, reason=f"not run: {native().reason}")
@pytest.mark.parametrize("model", ["gqa", "qwen3", "window", "long_rows"])
@pytest.mark.parametrize("scheme", [None, "weight_only_int8", "weight_only_int4"])
def test_a_layer_in_one_call_gives_the_bits_of_its_parts(model, scheme, folders):
    every, params = asked(8)
    found = []
    for ops in (None, {"decoder_layer": "decomposition"}):
        with opened(folders[model], ops=ops, quantization=scheme) as llm:
            chosen = {s["chosen"]["kernel"] for s in llm.explain()["sites"] if s["op"] == "decoder_layer"}
            assert any("native" in name for name in chosen) == (ops is None)
            found.append(scored(llm.generate(every, params)))
    assert found[0] == found[1]


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_together(threads, folders):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        every, params = asked(32)
        with opened(folders["gqa"]) as llm:
            alone = [scored(llm.generate([p], q))[0] for p, q in zip(every, params, strict=True)]
            for n in (2, 3, 7, 16, 31, 32):
                assert scored(llm.generate(every[:n], params[:n])) == alone[:n], f"{n} together"
    finally:
        torch.set_num_threads(before)


def test_a_false_claim_is_found(folders, monkeypatch):
    """A product whose order of addition follows the number of rows, and that says it is batch-invariant."""

    def linear(p, x):
        parts = min(x.shape[0], 3)
        columns = [torch.arange(i, x.shape[1], parts) for i in range(parts)]
        y = sum((x[:, c] @ p.weight[:, c].T).float() for c in columns)  # each part is rounded
        return (y if p.bias is None else y + p.bias).to(p.out_dtype or x.dtype)

    honest = backend.kernels
    claimed = next(k for k in honest() if k.op == "linear" and k.name == "torch_batch_invariant:linear")
    false = replace(claimed, target=linear, provider="false", rank=90)
    monkeypatch.setattr(backend, "kernels", lambda: [*honest(), false])
    with opened(folders["gqa"]) as llm:
        assert "false:linear" in llm.explain_text()
    assert differing(folders["gqa"], STEPS[:1], 8)
