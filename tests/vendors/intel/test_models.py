"""Every family on the emulator, with the head sizes that the vendor's operators know, beside the cpu backend.

In the vendor's dtypes by the logits' error against float32; with the one check of dtypes lifted, at float32, by tokens.
"""

from __future__ import annotations

import pytest
import torch

from inferplane.models.registry import ARCHITECTURES
from tests.vendors.configs import FAMILIES
from tests.vendors.intel import chip
from tests.vendors.models import errors_beside_cpu, tokens_beside_cpu

narrow = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")
wide = pytest.mark.skipif(not chip.LIFTED, reason="at float32: with INFERPLANE_EMULATED_FLOAT32=1")


def test_every_family_is_here():
    names = {name for config in FAMILIES.values() for name in config["architectures"]}
    assert names == set(ARCHITECTURES), "a family without a configuration in configs.py"


def cases():
    for family in FAMILIES:
        yield family, "plain", "whole_prompt"
    for family in ("llama", "llama_head_64", "mistral_window", "deepseek_v3"):
        yield from ((family, "plain", schedule) for schedule in ("ragged", "token_by_token"))
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        yield from ((family, weights, "ragged") for weights in ("int8_row", "int4_group", "fp8_block"))


@narrow
@pytest.mark.parametrize(("family", "weights", "schedule"), [pytest.param(*c, id="-".join(c)) for c in cases()])
def test_error_beside_cpu(family, weights, schedule, monkeypatch, record_property):
    record_property("error", errors_beside_cpu("xpu:intel", torch.bfloat16, family, weights, schedule, monkeypatch))


def wide_cases():
    for family in FAMILIES:
        yield family, "plain", 1000
    yield from (("llama", "plain", 7), ("deepseek_v3", "plain", 40), ("mistral_window", "plain", 33))
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        yield from ((family, weights, 1000) for weights in ("int8_row", "int4_group", "fp8_block"))


@wide
@pytest.mark.parametrize(("family", "weights", "chunk"), list(wide_cases()), ids=str)
def test_greedy_tokens_are_those_of_cpu(family, weights, chunk):
    tokens_beside_cpu("xpu:intel", ("vllm_xpu",), family, weights, chunk)
