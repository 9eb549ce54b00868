"""How much of a decode step runs on the vendor's functions, by number of sites, at published sizes, without a DCU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from inferplane.binding import Settings, bind
from inferplane.conformance.configs import SLICES, model
from inferplane_dcu.backend import DcuBackend

VENDOR = ("lightop", "hcu_ops", "flash_attn", "flash_mla")
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


def sites(config, kind, arch):
    """`(op, provider)` of everything that is bound in a step of a kind; "" is an op's own body."""
    backend = DcuBackend()
    settings = Settings("dcu", torch.bfloat16, arch, backend.features(arch), assumed=True)
    offer = lambda r: [x for x in backend.kv_layouts(r, torch.bfloat16) if x.kv_dtype == "auto"]  # noqa: E731
    for _, op, choice in bind(model(config), backend.kernels(), settings, offer).sites(kind):
        if choice.kernel is not None:
            yield op.name, choice.kernel.provider
        elif choice.own_hot or not choice.children:
            yield op.name, ""


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama_8b", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("arch", ["gfx936", "gfx928"])
def test_a_step_is_the_vendors(config, kind, arch, record_property):
    bound = Counter(sites(config, kind, arch))
    total = sum(bound.values())
    vendor = sum(n for (_, provider), n in bound.items() if provider in VENDOR)
    bound_by = lambda name: sum(n for (_, provider), n in bound.items() if provider == name)  # noqa: E731
    served = vendor + bound_by("triton") + bound_by("torch")
    record_property("share", {"sites": total, "vendor": vendor, "vendor, portable or torch": served})
    print(
        f"\n{arch} {kind}: {total} sites, {vendor} the vendor's, {bound_by('triton')} portable, "
        f"{bound_by('torch')} torch's on the DCU, {total - served} other"
    )
    assert served >= 0.7 * total, bound
    for (op, provider), n in bound.items():
        assert op not in ATTENTION_OR_CACHE or provider in (*VENDOR, "triton"), (op, provider, n)
