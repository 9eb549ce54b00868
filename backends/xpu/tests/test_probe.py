"""What both variants of the family have in common: registration, features, layouts, light imports."""

from __future__ import annotations

import pytest
import torch

from inferplane.plugin import KVRequest
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun.backend import KunlunBackend

GQA, MLA = KVRequest("gqa", 8, 128, 128), KVRequest("mla", 1, 576)


def test_assumed_architectures():
    assert list(IntelBackend.architectures) == ["bmg", "lnl", "pvc", "dg2"]
    libraries = ("kunlun-ops", "xspeedgate-ops", "group-topk")
    assert KunlunBackend.architectures == {"p800": ("fp16", "bf16", "int8-dot", *libraries)}
    assert IntelBackend().features()["bf16"].present
    assert IntelBackend().features("pvc")["fp8"].present is None
    assert KunlunBackend().features()["fp8"].present is False
    assert not KunlunBackend().features("bmg"), "another vendor's architecture is unknown in everything"
    assert "bf16" not in IntelBackend().features("p800")


@pytest.mark.parametrize(
    ("variant", "request_", "tokens", "kv_dtypes"),
    [
        (IntelBackend, GQA, 64, ["auto", "int8", "fp8", "fp8"]),
        (IntelBackend, MLA, 64, ["auto", "int8", "fp8", "fp8"]),
        (KunlunBackend, GQA, 16, ["auto", "int8"]),
        (KunlunBackend, MLA, 64, ["auto", "int8"]),
    ],
)
def test_block_tokens(variant, request_, tokens, kv_dtypes):
    layouts = variant().kv_layouts(request_, torch.bfloat16)
    assert {layout.block_tokens for layout in layouts} == {tokens}
    assert [layout.kv_dtype for layout in layouts] == kv_dtypes
