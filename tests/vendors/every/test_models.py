"""Every family on the emulator, with the head sizes that vendors' operators know, beside the cpu backend.

In the vendor's dtypes by the logits' error against float32; with the one check of dtypes lifted, at float32, by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferplane.models.registry import ARCHITECTURES
from tests.vendors import profile
from tests.vendors.configs import FAMILIES
from tests.vendors.models import errors_beside_cpu, tokens_beside_cpu
from tests.vendors.profile import in_float32, in_vendor_dtypes

VENDOR = profile.current()


def test_every_family_is_here():
    names = {name for config in FAMILIES.values() for name in config["architectures"]}
    assert names == set(ARCHITECTURES), "a family without a configuration in configs.py"


@in_vendor_dtypes
@pytest.mark.parametrize(
    ("family", "weights", "schedule"), [pytest.param(*model, id="-".join(model)) for model in VENDOR.models()]
)
def test_error_beside_cpu(family, weights, schedule, monkeypatch, record_property):
    found = errors_beside_cpu(VENDOR.device, VENDOR.dtype, family, weights, schedule, monkeypatch)
    record_property("error", found)


def float32_cases() -> Iterator[tuple[str, str, int]]:
    """Family, weight format, and tokens of the prompt a step."""
    for family in FAMILIES:
        yield family, "plain", 1000
    yield from (("llama", "plain", 7), ("deepseek_v3", "plain", 40), ("mistral_window", "plain", 33))
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        yield from ((family, weights, 1000) for weights in VENDOR.formats)


@in_float32
@pytest.mark.parametrize(("family", "weights", "chunk"), list(float32_cases()), ids=str)
def test_greedy_tokens_are_those_of_cpu(family, weights, chunk):
    providers = ("torch_scores", "torch_sdpa") if family in VENDOR.composed_attention else VENDOR.attention(family)
    tokens_beside_cpu(VENDOR.device, providers, family, weights, chunk)
