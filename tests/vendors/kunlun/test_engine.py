"""The whole engine on the emulator, as a user would start it: binding, start-up canary, loading, batching, tokens."""

from __future__ import annotations

import warnings

import pytest

from inferplane import LLM, SamplingParams
from inferplane.engine.runner import InferplaneWarning
from tests.vendors.configs import FAMILIES
from tests.vendors.kunlun import chip

DEVICE = "xpu:kunlun"
DRAFTS = {"speculate_method": "ngram", "speculate_max_draft_token_num": 3}
OPTIONS = {"load_format": "dummy", "kv_cache_bytes": 1 << 23, "max_batch": 4, "max_step_tokens": 48}
PROMPTS = [[(7 * i + 3) % 199 for i in range(n)] for n in (130, 3, 61)]
narrow = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")


@narrow
@pytest.mark.parametrize("family", FAMILIES)
def test_serves(family):
    """Every kernel passes its canary, no hot op is left on a reference; chunks, tokens and drafts share steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        with LLM(FAMILIES[family], device=DEVICE, dtype="bfloat16", strict=True, speculative=DRAFTS, **OPTIONS) as llm:
            results = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
            plan = llm.explain()
    assert [len(result.token_ids) for result in results] == [12, 12, 12]
    latents = family.startswith("deepseek")
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {"kunlun_latent_64" if latents else "kunlun_bhld_16"}
    attention = [
        s["chosen"]["kernel"] for s in plan["sites"] if s["op"] in ("attention", "mla_absorbed", "mla_expanded")
    ]
    vendor = [kernel.startswith("kunlun_ops:") for kernel in attention]
    assert attention and not any(vendor) if family == "mistral_window" else all(vendor), attention


@narrow
@pytest.mark.parametrize(("quantization", "dtype"), [("weight_only_int8", "bfloat16"), ("weight_only_int4", "float16")])
def test_serves_quantized(quantization, dtype):
    with LLM(FAMILIES["llama"], device=DEVICE, dtype=dtype, quantization=quantization, **OPTIONS) as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0))
        kernels = {site["chosen"]["kernel"] for site in llm.explain()["sites"]}
    assert [len(result.token_ids) for result in results] == [8, 8, 8]
    assert ("kunlun_ops:linear_w4a16" in kernels) == (dtype == "float16"), kernels


@pytest.mark.skipif(not chip.LIFTED, reason="at float32: with INFERPLANE_EMULATED_FLOAT32=1")
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_tokens_are_those_of_cpu(family, speculative):
    """Sampled with seeds, in one batch, with and without drafts; a prompt's blocks are used again by the next."""
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, seed=11)
    found = {}
    for device in ("cpu", DEVICE):
        with LLM(FAMILIES[family], device=device, dtype="float32", speculative=speculative, **OPTIONS) as llm:
            found[device] = [[r.token_ids for r in llm.generate(PROMPTS, params)] for _ in range(2)]
    assert found[DEVICE] == found["cpu"]
