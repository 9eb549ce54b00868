"""How much of a decode step runs on vllm-xpu-kernels' operators, by number of sites, at published sizes; no GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from inferplane.binding import Settings, bind
from inferplane.conformance.configs import SLICES, model
from inferplane_xpu.intel.backend import IntelBackend

VENDOR = ("vllm_xpu", "torch_xpu")
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
ATTENTION_OR_CACHE = ("attention", "kv_write", "mla_absorbed", "mla_expanded", "mla_kv_write")


def sites(config, kind, arch="bmg"):
    """`(op, provider)` of everything that is bound in a step of a kind; "" is an op's own body."""
    backend = IntelBackend()
    settings = Settings("xpu:intel", torch.bfloat16, arch, backend.features(arch), assumed=True)
    offer = lambda r: [x for x in backend.kv_layouts(r, torch.bfloat16) if x.kv_dtype == "auto"]  # noqa: E731
    for _, op, choice in bind(model(config), backend.kernels(), settings, offer).sites(kind):
        if choice.kernel is not None:
            yield op.name, choice.kernel.provider
        elif choice.own_hot or not choice.children:
            yield op.name, ""


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama_8b", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_step_is_the_vendors(config, kind, record_property):
    bound = Counter(sites(config, kind))
    total = sum(bound.values())
    vendor = sum(n for (_, provider), n in bound.items() if provider in VENDOR)
    served = vendor + sum(n for (_, provider), n in bound.items() if provider == "torch")
    record_property("share", {"sites": total, "vendor": vendor, "vendor or torch": served})
    print(
        f"\n{kind}: {total} sites, {vendor} the vendor's, {served - vendor} torch's on the GPU, {total - served} other"
    )
    assert served >= 0.7 * total, bound
    for (op, provider), n in bound.items():
        assert op not in ATTENTION_OR_CACHE or provider in VENDOR, (op, provider, n)


def test_a_gpu_without_the_matrix_kernels_walks_down_with_the_reason():
    """An Alchemist has norms, positions and writes of the extension; attention is torch's, a sequence at a time."""
    bound = Counter(sites(LLAMA, "decode", "dg2"))
    assert bound["add_rms_norm", "vllm_xpu"] and bound["kv_write", "vllm_xpu"]
    assert bound["attention", "torch_sdpa"] == 2 * 32, "for few query tokens and for many"
