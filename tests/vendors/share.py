"""How much of a step runs on a vendor's functions, by number of sites, at published sizes, without its hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from inferplane.binding import PlanSettings, bind
from inferplane.conformance.configs import SLICES, model
from inferplane.plugin import Backend, StepKind

LLAMA: dict[str, Any] = {**SLICES["llama_8b_two_layers"], "num_hidden_layers": 32, "vocab_size": 128256}
DEEPSEEK: dict[str, Any] = {
    **SLICES["deepseek_v3_two_layers"],
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
}
PUBLISHED = pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama_8b", "deepseek_v3"])
KINDS = pytest.mark.parametrize("kind", ["decode", "mixed"])
ATTENTION_OR_CACHE = ("attention", "kv_write", "mla_absorbed", "mla_expanded", "mla_kv_write", "mla_block")


def count_providers(
    backend: Backend, config: dict[str, Any], arch: str, kind: StepKind, dtype: torch.dtype = torch.bfloat16
) -> Counter[tuple[str, str]]:
    """How often each `(op, provider)` is bound in a step of a kind; "" is an op's own body."""
    return Counter(_sites(backend, config, arch, kind, dtype))


def _sites(
    backend: Backend, config: dict[str, Any], arch: str, kind: StepKind, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    settings = PlanSettings(backend.name, dtype, arch, backend.features(arch), assumed=True)
    plan = bind(
        model(config),
        backend.kernels(),
        settings,
        lambda request: [x for x in backend.kv_layouts(request, dtype) if x.kv_dtype == "auto"],
    )
    for site, op, choice in plan.sites(kind):
        if choice.kernel is not None:
            yield op.name, choice.kernel.provider
        elif choice.own_hot or not choice.children:
            yield op.name, ""
        else:
            assert op.name in ("causal_lm", "decoder_stack") or "." in site


def count_sites(found: Counter[tuple[str, str]], *providers: str) -> int:
    """Sites bound to one of these providers."""
    return sum(n for (_, provider), n in found.items() if provider in providers)


def check(
    found: Counter[tuple[str, str]],
    vendor: tuple[str, ...],
    record: Callable[[str, object], None],
    *,
    min_share: float = 0.7,
    portable: tuple[str, ...] = (),
) -> None:
    """At least this share of the sites is the vendor's, portable, or torch's own on the device; and whatever attends or
    reads and writes the cache is the vendor's or portable.
    """
    total = found.total()
    own, ours, torchs = (count_sites(found, *names) for names in (vendor, portable, ("torch",)))
    shares = {"sites": total, "vendor": own, "portable": ours, "torch on the device": torchs}
    record("share", shares)
    print("\n" + ", ".join(f"{n} {what}" for what, n in shares.items()))
    assert own + ours + torchs >= min_share * total, found
    for (op, provider), n in found.items():
        assert op not in ATTENTION_OR_CACHE or provider in (*vendor, *portable), (op, provider, n)
