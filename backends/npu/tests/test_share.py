"""How much of a decode step runs on the vendor's operators, by number of sites, at published sizes, without an NPU."""

from __future__ import annotations

import pytest
import torch

from inferplane_npu.backend import NpuBackend
from tests.vendors.share import ATTENTION_OR_CACHE, LLAMA, PUBLISHED, check, count_providers, count_sites

VENDOR = ("torch_npu", "atb")
ARCHS = pytest.mark.parametrize("arch", ["910b", "910_93", "950"])


@ARCHS
@PUBLISHED
def test_a_decode_step_is_the_vendors(config, arch, record_property):
    check(count_providers(NpuBackend(), config, arch, "decode"), VENDOR, record_property, min_share=0.8)


@ARCHS
@PUBLISHED
def test_prompts_attend_by_the_vendors_operators_too(config, arch):
    found = count_providers(NpuBackend(), config, arch, "mixed")
    assert {provider for op, provider in found if op in ATTENTION_OR_CACHE} <= set(VENDOR)


def test_the_310p_runs_llama_on_atb():
    found = count_providers(NpuBackend(), LLAMA, "310p", "decode", torch.float16)
    assert {provider for op, provider in found if op in ATTENTION_OR_CACHE} == {"atb"}
    assert count_sites(found, *VENDOR, "torch") >= 0.8 * found.total(), found
