"""How much of a decode step runs on the vendor's operators, by number of sites, at published sizes, without an NPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from inferplane.binding import Settings, bind
from inferplane.conformance.configs import SLICES, model
from inferplane_npu.backend import NpuBackend

VENDOR = ("torch_npu", "atb")
LLAMA = {**SLICES["llama_8b_two_layers"], "num_hidden_layers": 32, "vocab_size": 128256}
DEEPSEEK = {
    **SLICES["deepseek_v3_two_layers"],
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
}
WEIGHTS_OR_CACHE = ("attention", "kv_write", "mla_absorbed", "mla_expanded", "mla_kv_write", "mla_block")


def sites(config, arch, dtype, kind):
    """`(op, provider)` of everything that is bound in a step of a kind; "" is an op's own body."""
    backend = NpuBackend()
    settings = Settings("npu", dtype, arch, backend.features(arch), assumed=True)
    offer = lambda r: [x for x in backend.kv_layouts(r, dtype) if x.kv_dtype == "auto"]  # noqa: E731
    tree = model(config)
    plan = bind(tree, backend.kernels(), settings, offer)
    for site, op, choice in plan.sites(kind):
        if choice.kernel is not None:
            yield op.name, choice.kernel.provider
        elif choice.own_hot or not choice.children:
            yield op.name, ""
        else:
            assert site == "" or "." in site


@pytest.mark.parametrize("arch", ["910b", "910_93", "950"])
@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama_8b", "deepseek_v3"])
def test_a_decode_step_is_the_vendors(config, arch, record_property):
    bound = Counter(sites(config, arch, torch.bfloat16, "decode"))
    total = sum(bound.values())
    vendor = sum(n for (_, provider), n in bound.items() if provider in VENDOR)
    served = vendor + sum(n for (_, provider), n in bound.items() if provider == "torch")
    record_property("share", {"sites": total, "vendor": vendor, "vendor or torch": served})
    print(
        f"\n{arch}: {total} sites, {vendor} the vendor's, {served - vendor} torch's on the NPU, {total - served} other"
    )
    assert served >= 0.8 * total, bound
    for (op, provider), n in bound.items():
        assert op not in WEIGHTS_OR_CACHE or provider in VENDOR, (op, provider, n)


@pytest.mark.parametrize("arch", ["910b", "910_93", "950"])
@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama_8b", "deepseek_v3"])
def test_prompts_attend_by_the_vendors_operators_too(config, arch):
    bound = Counter(sites(config, arch, torch.bfloat16, "mixed"))
    assert {provider for op, provider in bound if op in WEIGHTS_OR_CACHE} <= set(VENDOR)


def test_the_310p_runs_llama_on_atb():
    bound = Counter(sites(LLAMA, "310p", torch.float16, "decode"))
    assert {provider for op, provider in bound if op in WEIGHTS_OR_CACHE} == {"atb"}
    served = sum(n for (_, provider), n in bound.items() if provider in (*VENDOR, "torch"))
    assert served >= 0.8 * sum(bound.values()), bound
