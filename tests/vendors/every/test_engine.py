"""The whole engine on the emulator, as a user would start it: binding, start-up canary, loading, batching, tokens."""

from __future__ import annotations

import warnings

import pytest

from inferplane import LLM, SamplingParams
from inferplane.engine import InferplaneWarning
from tests.vendors import profile
from tests.vendors.configs import FAMILIES
from tests.vendors.engine import OPTIONS, PROMPTS, serve
from tests.vendors.profile import DRAFTS, in_float32, in_vendor_dtypes

VENDOR = profile.current()


@in_vendor_dtypes
@pytest.mark.parametrize("speculative", VENDOR.speculative.values(), ids=list(VENDOR.speculative))
@pytest.mark.parametrize("family", VENDOR.engine_families)
def test_serves(family, speculative):
    """Every kernel passes its canary, no hot op is left on a reference, and prompts of all lengths share steps: chunks
    of a long prompt, single tokens and, with drafts, two to four tokens of a sequence.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve(VENDOR.device, VENDOR.dtype, family, strict=True, speculative_config=speculative)
    assert {layout["layout"] for layout in plan["kv_layouts"]} == VENDOR.layouts(family)
    VENDOR.check_kernels(family, [(s["op"], s["chosen"]["kernel"]) for s in plan["sites"] if s["chosen"]["rank"]])


@in_vendor_dtypes
@pytest.mark.parametrize(("scheme", "kernel", "family"), list(VENDOR.quantized_models()))
def test_serves_quantized(scheme, kernel, family):
    """The vendor's product with quantized weights passes its canary and serves every linear layer but routers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve(VENDOR.device, VENDOR.dtype, family, strict=True, quantization=scheme)
    linear = {s["chosen"]["kernel"] for s in plan["sites"] if s["op"] == "linear" and "router" not in s["site"]}
    assert linear == {kernel}
    assert "linear" in {item["op"] for item in plan["quantized"]}


@in_float32
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_tokens_are_those_of_cpu(family, speculative):
    """Sampled with seeds, in one batch, with and without drafts; a prompt's blocks are used again by the next."""
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, seed=11)
    found = {}
    for device in ("cpu", VENDOR.device):
        with LLM(FAMILIES[family], device=device, dtype="float32", speculative_config=speculative, **OPTIONS) as llm:
            found[device] = [[r.token_ids for r in llm.generate(PROMPTS, params)] for _ in range(2)]
    assert found[VENDOR.device] == found["cpu"]
