"""The whole engine on the emulator, as a user would start it: binding, start-up canary, loading, batching, tokens."""

from __future__ import annotations

import warnings

import pytest

from inferplane import LLM, SamplingParams
from inferplane.engine.runner import InferplaneWarning
from tests.vendors.configs import FAMILIES
from tests.vendors.intel import chip

DRAFTS = {"speculate_method": "ngram", "speculate_max_draft_token_num": 3}
OPTIONS = {"load_format": "dummy", "kv_cache_bytes": 1 << 23, "max_batch": 4, "max_step_tokens": 48}
PROMPTS = [[(7 * i + 3) % 199 for i in range(n)] for n in (130, 3, 61)]
SCALED = ("vllm_xpu", "torch_xpu", "torch", "decomposition")


@pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")
@pytest.mark.parametrize("family", FAMILIES)
def test_serves(family):
    """Every kernel passes its canary, no hot op is left on a reference; chunks, tokens and drafts share steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        options = {**OPTIONS, "dtype": "bfloat16", "strict": True, "speculative": DRAFTS}
        with LLM(FAMILIES[family], device="xpu:intel", **options) as llm:
            results = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
            plan = llm.explain()
    assert [len(result.token_ids) for result in results] == [12, 12, 12]
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {"paged_64"}
    providers = {site["chosen"]["kernel"].partition(":")[0] for site in plan["sites"] if site["chosen"]["rank"]}
    assert providers <= set(SCALED), "torch_sdpa would be a loop over sequences"


@pytest.mark.skipif(not chip.LIFTED, reason="at float32: with INFERPLANE_EMULATED_FLOAT32=1")
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_tokens_are_those_of_cpu(family, speculative):
    """Sampled with seeds, in one batch, with and without drafts; a prompt's blocks are used again by the next."""
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, seed=11)
    found = {}
    for device in ("cpu", "xpu:intel"):
        with LLM(FAMILIES[family], device=device, dtype="float32", speculative=speculative, **OPTIONS) as llm:
            found[device] = [[r.token_ids for r in llm.generate(PROMPTS, params)] for _ in range(2)]
    assert found["xpu:intel"] == found["cpu"]
