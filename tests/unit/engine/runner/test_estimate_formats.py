"""Estimates of quantized weights: the bytes are those that loading takes, with scales and entries of 4 and 6 bits."""

from __future__ import annotations

import json
import warnings

import jsonschema
import pytest

from inferplane import LLM
from inferplane.cli import main
from inferplane.engine import InferplaneWarning, ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.estimate import count_formats, estimate
from inferplane.ops.formats import count_bytes
from inferplane.plugins import host
from inferplane_cpu.native import instruction_sets
from tests.house.rules import REPOSITORY
from tests.unit.gguf.files import llama, write
from tests.vendors.share import DEEPSEEK

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NATIVE = pytest.mark.skipif(not instruction_sets(), reason="not run: no native kernels")


def loaded_bytes(llm):
    return sum(packed.nbytes for packed in llm.runner.loaded.packed.values())


@NATIVE
@pytest.mark.parametrize("scheme", [None, "weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8_wint4"])
def test_bytes_of_schemes_are_those_that_are_loaded(scheme):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)
        llm = LLM("demo", device="cpu", dtype="bfloat16", quantization=scheme)
    with llm:
        assert loaded_bytes(llm) == pytest.approx(llm.runner.plan.weight_bytes, rel=0.002)
        found = count_formats(llm.runner.plan)
        assert sum(share.nbytes for share in found) == pytest.approx(llm.runner.plan.weight_bytes, rel=0.1)


@NATIVE
@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
)
def test_bytes_of_gguf_types_are_those_that_are_loaded(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / f"tiny-{kind}.gguf", llama(kind))
    with LLM(file, device="cpu", dtype="bfloat16", max_model_len=64) as llm:
        assert loaded_bytes(llm) == pytest.approx(llm.runner.plan.weight_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("scheme", "experts", "rest"),
    [
        ("weight_only_int8", 8.125, 8.125),
        ("weight_only_int4", 4.625, 4.625),
        ("a8w8", 8, 8),
        ("a8w8_fp8_wint4", 4.25, 8),
    ],
)
def test_deepseeks_sizes_in_each_scheme(scheme, experts, rest):
    """Parameters times bits: 58 layers with 256 routed experts, all other matrices of layers, embedding and head."""
    if not instruction_sets():
        pytest.skip("not run: no native kernels")
    options = RunnerOptions(dtype="bfloat16", quantization=scheme, kv_cache_bytes=2**20)
    runner = Runner.plan_only(ModelFiles({**DEEPSEEK, "quantization_config": FP8}), host(), "cpu", options)
    found = estimate(runner, None, 1024)
    of_experts = 58 * 256 * 3 * 7168 * 2048
    matrices = sum(w.shape[0] * w.shape[1] for w in runner.plan.weights.values() if w.parts and len(w.shape) == 2)
    embeddings = 2 * 129280 * 7168
    want = (of_experts * experts + (matrices - embeddings) * rest + embeddings * 12) / 8
    assert of_experts == 653_908_770_816
    assert found.weights == pytest.approx(want, rel=0.02)
    assert sum(share.parameters for share in found.formats) == pytest.approx(671.0e9, rel=0.002)
    assert runner.requantized and all(stored == "fp8_block" for stored, _ in runner.requantized)


def test_bytes_of_formats():
    assert count_bytes((2, 64, 256), "int4_group32", dense=True) == 2 * 64 * (128 + 4 * 8)
    assert count_bytes((64, 256), "int4_min32", dense=True) == 64 * (128 + 2 * 4 * 8)
    assert count_bytes((130, 130), "fp8_block") == 130 * 130 + 4 * 4
    assert count_bytes((64, 256), "int8_row") == 64 * 260
    assert count_bytes((64, 256), "of a plugin") == 64 * 256


def test_formats_are_listed(capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    words = ("estimate", "demo", "--device", "cpu", "--dtype", "bfloat16", "--quantization", "a8w8")
    assert main.main([*words, "--json"]) == 0
    out = capsys.readouterr()
    data = json.loads(out.out)
    jsonschema.validate(data, json.loads((REPOSITORY / "docs/schemas/estimate.json").read_text()))
    assert {"int8_row", "bfloat16"} <= {entry["format"] for entry in data["formats"]}
    assert "from fp8_block to int8_row" in out.err
    assert main.main([*words[:6], "--json"]) == 0
    assert main.main(["explain", *words[1:], "--json"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    jsonschema.validate(data, json.loads((REPOSITORY / "docs/schemas/explain.json").read_text()))
    assert data["requantized"] == [{"stored": "fp8_block", "format": "int8_row", "weights": 224}]
    assert main.main(["explain", *words[1:]]) == 0
    assert "224 from fp8_block to int8_row" in " ".join(capsys.readouterr().out.split())
