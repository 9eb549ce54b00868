"""The page of quantizations by device: letters by plans, and a reason for each that is not native."""

import pytest
import quantization_page

from inferplane.conformance.configs import SLICES
from inferplane.plugins import discover

LLAMA = SLICES["llama_8b_two_layers"]


@pytest.fixture(scope="module")
def host():
    return discover("only,inferplane_gcu.plugin,inferplane_npu.plugin,inferplane_xpu.plugin")


@pytest.mark.parametrize(
    ("device", "arch", "name", "cache", "letter", "needed"),
    [
        ("npu", "910b", "a8w8", "auto", "n", set()),
        ("gcu", "s60", "a8w8", "auto", "n", set()),
        (
            *("xpu:intel", "bmg", "a8w8", "auto", "w"),
            {("xpu:intel", "linear", "activations int8 beside int8")},
        ),
        ("npu", "910b", "a8w8_fp8", "auto", "e", {("npu", "linear", "fp8")}),
        ("npu", "950", "a8w8_fp8", "auto", "n", set()),
        ("npu", "910b", "weight_only_int8", "int8", "n", set()),
        ("gcu", "s60", "weight_only_int8", "int8", "n", {("gcu", "static", "int8")}),
        ("xpu:intel", "bmg", "weight_only_int8", "int8", "t", {("xpu:intel", "attention", "int8")}),
        ("npu", "910b", "weight_only_int8", "fp8", "-", {("npu", "cache", "fp8")}),
    ],
)
def test_letters(host, device, arch, name, cache, letter, needed):
    assert quantization_page.judge(host, device, arch, LLAMA, name, cache) == (letter, needed)


def test_a_letter_without_a_reason_and_a_reason_without_a_letter(host, monkeypatch):
    known = ("npu", "linear", "fp8")
    assert "npu_quant_matmul" in next(quantization_page.explain({known: None}))
    with pytest.raises(SystemExit, match="lacks"):
        list(quantization_page.explain({("npu", "linear", "int4"): None}))
    with pytest.raises(SystemExit, match=r"no cell needs the reasons for .*'dcu'"):
        quantization_page.page(host)
