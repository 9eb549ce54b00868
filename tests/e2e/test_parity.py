"""Random models of every family against transformers: cuts of prompts, greedy text, bf16, forms of MLA."""

from __future__ import annotations

import copy

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.binding import view_of
from inferplane.errors import CapacityError
from tests.e2e.mixtures import ragged
from tests.e2e.tiny_models import (
    DEEPSEEK,
    FAMILIES,
    LLAMA,
    config_of,
    greedy_tokens,
    logits_of,
    make,
    prompts,
    random_model,
)

CASES = [*(f"llama-{c}" for c in LLAMA), *(f"deepseek-{c}" for c in DEEPSEEK)]
NEWER = [f"{family}-{case}" for family, (_, _, cases) in FAMILIES.items() for case in cases]
BF16_CASES = [*CASES, *(f"{family}-{next(iter(cases))}" for family, (_, _, cases) in FAMILIES.items())]
FLOAT32 = 1e-5
BF16 = 1.25


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and got.dtype == torch.float32 and want.abs().max() > 1
    return float((got - want).abs().max() / want.abs().max())


@pytest.fixture(scope="module", params=[*CASES, *NEWER])
def pair(request, tmp_path_factory):
    """transformers' model and ours from its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make(*request.param.split("-"), folder)
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
        assert llm.device == "cpu" and not llm.runner.loaded.unused
        yield model, llm


@pytest.fixture(scope="module")
def whole(pair):
    """Prompts, and transformers' logits after each of their tokens."""
    model, llm = pair
    many = prompts(llm.engine.vocab, (70, 37, 1))
    return many, [logits_of(model, ids) for ids in many]


@pytest.mark.parametrize("chunk_tokens", [1000, 7, 1])
def test_prompts_cut_in_any_way(pair, whole, chunk_tokens):
    many, wanted = whole
    for got, want in zip(pair[1].logits(many, chunk_tokens=chunk_tokens), wanted, strict=True):
        assert error(got, want) <= FLOAT32


def test_ragged_mixtures(pair):
    """Sequences at different phases share steps and scattered blocks of a cache that was full of NaN."""
    model, llm = pair
    many = prompts(llm.engine.vocab, (1, 8, 9, 16, 33, 64, 90), seed=2)
    logits, kinds = ragged(llm.runner, many)
    assert {("decode", False, False), ("mixed", True, True)} <= kinds
    for ids, got in zip(many, logits):
        assert error(got, logits_of(model, ids)) <= FLOAT32


def test_greedy_tokens(pair):
    """64 tokens each, more prompts than the batch holds, one longer than a step."""
    model, llm = pair
    many = prompts(llm.engine.vocab, (5, 1, 70, 17, 29), seed=3)
    results = llm.generate(many, SamplingParams(max_tokens=64, temperature=0))
    for ids, result in zip(many, results):
        assert result.token_ids == greedy_tokens(model, ids, result.token_ids) and len(result.token_ids) == 64
        assert result.finish_reason == "length" and result.text == ""
    assert llm.engine.pools.used == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_window_takes_the_blocks_of_a_window(enable_prefix_caching, tmp_path):
    """300 tokens and 64 more in a cache of 96; blocks before the window are used again and again."""
    model = make("mistral", "window", tmp_path)
    ids, other = prompts(model.config.vocab_size, (300, 130), seed=4)
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": enable_prefix_caching,
    }
    with LLM(tmp_path, kv_cache_bytes=10**6, **settings) as llm:
        block = llm.runner.block_bytes()
        tokens = llm.runner.cache.block_tokens
    with LLM(tmp_path, kv_cache_bytes=96 // tokens * block, **settings) as llm:
        assert llm.runner.cache.blocks * tokens == 96 and llm.runner.max_model_len == 512
        params = SamplingParams(max_tokens=64, temperature=0)
        both = llm.generate([ids, other], params)
        again = llm.generate([other, ids], params)
        assert both[0].token_ids == again[1].token_ids == greedy_tokens(model, ids, both[0].token_ids)
        assert len(both[0].token_ids) == 64
        assert both[1].token_ids == again[0].token_ids
        assert llm.engine.pools.used == 0
    with (
        LLM(tmp_path, kv_cache_bytes=32 // tokens * block, **settings) as llm,
        pytest.raises(CapacityError, match="32 "),
    ):
        llm.generate([ids[:40]], params)


# ------------------------------------------------------------------ bf16


def bf16_errors(config, seed, folder, *, count, chunk_tokens=None):
    """Errors `[prompts, tokens, vocab]` of ours and of transformers' bf16 against float32, over the largest logit.

    Rotary frequencies stay in float32, as `from_pretrained` leaves them in every dtype: `Module.to` would round them.
    """
    model = random_model(config, seed)
    frequencies = {name: t.clone() for name, t in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    half, model = copy.deepcopy(model), model.float()
    for name, exact in frequencies.items():
        path, _, buffer = name.rpartition(".")
        for each in (half, model):
            setattr(each.get_submodule(path), buffer, exact.clone())
    ours, theirs = [], []
    with LLM(folder, device="cpu") as llm:
        assert llm.runner.dtype is torch.bfloat16
        for ids in prompts(config.vocab_size, (64,) * count, seed):
            want = logits_of(model, ids)
            top = want.abs().max()
            ours.append((llm.logits([ids], chunk_tokens=chunk_tokens)[0] - want) / top)
            theirs.append((logits_of(half, ids) - want) / top)
    return torch.stack(ours), torch.stack(theirs)


def rms(x):
    return float(x.pow(2).mean().sqrt())


def largest(x):
    """Mean over prompts of the largest error in each: one prompt's alone is a matter of luck."""
    return float(x.abs().amax((-1, -2)).mean())


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("case", BF16_CASES)
def test_bf16_error_without_routing(case, chunk_tokens, tmp_path):
    """Every expert is chosen, so that an error is a rounding and not another expert."""
    family, name = case.split("-")
    changes = {"num_experts_per_tok": 8} if family in ("deepseek", "deepseek_v2", "qwen3_moe", "mixtral") else {}
    if family == "deepseek":
        changes["topk_group"] = DEEPSEEK[name].get("n_group", 4)
    config = config_of(family, name, **changes)
    ours, theirs = bf16_errors(config, BF16_CASES.index(case), tmp_path, count=8, chunk_tokens=chunk_tokens)
    assert 1e-4 < rms(theirs) < 1e-2
    assert rms(ours) <= BF16 * rms(theirs)
    assert largest(ours) <= BF16 * largest(theirs)


def test_bf16_error_with_routing(tmp_path):
    """A router that is a hair's breadth from another choice makes both err by a whole expert: judged over all cases."""
    both = [bf16_errors(config_of("deepseek", c), i, tmp_path / c, count=16) for i, c in enumerate(DEEPSEEK)]
    ours, theirs = (torch.cat([pair[k].flatten(1).pow(2).mean(1) for pair in both]).mean().sqrt() for k in (0, 1))
    assert ours <= BF16 * theirs
    for ours, theirs in both:  # a token's error in the median, which no change of experts decides
        assert ours.pow(2).mean(-1).median().sqrt() <= BF16 * theirs.pow(2).mean(-1).median().sqrt()


# ------------------------------------------------------------------ latent attention, KV dtypes


@pytest.mark.parametrize("case", ["q_lora", "q_full", "yarn"])
def test_both_forms_of_latent_attention(case, tmp_path):
    model = make("deepseek", case, tmp_path)
    many = prompts(model.config.vocab_size, (60, 3))
    for form in ("absorbed", "expanded"):
        with LLM(tmp_path, device="cpu", dtype="float32", ops={"mla_block": form}) as llm:
            blocks = [s for s in llm.explain()["sites"] if s["op"] == "mla_block"]
            assert blocks and all(form in s["chosen"]["kernel"] for s in blocks)
            other = {"absorbed": "expanded", "expanded": "absorbed"}[form]
            for steps in llm.runner.steps.values():  # the form that was not asked for is never called
                for layer in view_of(view_of(steps).layers).layers:
                    setattr(view_of(view_of(layer).attn), other, None)
            for chunk_tokens in (1000, 9, 1):
                for ids, got in zip(many, llm.logits(many, chunk_tokens=chunk_tokens)):
                    assert error(got, logits_of(model, ids)) <= FLOAT32


@pytest.mark.parametrize(("kv_dtype", "bound"), [("fp8", 6e-2), ("int8", 2e-2)])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_kv_dtypes(family, kv_dtype, bound, tmp_path):
    """Entries are rounded when written, so that cutting a prompt differently changes next to nothing."""
    changes = {} if family == "llama" else {"num_experts_per_tok": 8, "topk_group": 4}
    model = random_model(config_of(family, next(iter(LLAMA if family == "llama" else DEEPSEEK)), **changes))
    model.save_pretrained(tmp_path)
    many = prompts(model.config.vocab_size, (90, 41))
    with LLM(tmp_path, device="cpu", dtype="float32", kv_dtype=kv_dtype) as llm:
        assert all(kv_dtype in layer.layout for layer in llm.runner.cache.layers)
        whole = llm.logits(many)
        rounding = [error(got, logits_of(model, ids)) for ids, got in zip(many, whole)]
        assert all(1e-4 < e <= bound for e in rounding)
        for chunk_tokens in (1, 7, 9):
            for want, got in zip(whole, llm.logits(many, chunk_tokens=chunk_tokens)):
                assert error(got, want) <= 0.02 * max(rounding)  # one entry may fall to the other side of a step
