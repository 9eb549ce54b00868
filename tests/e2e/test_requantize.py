"""Quantized checkpoints under a quantization scheme: they compute as their values in float32 do, quantized alike."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.binding import DictSource
from inferplane.engine import InferplaneWarning
from inferplane.engine.runner.model_files import DEMO_FOLDER
from inferplane.models.convert import convert
from inferplane.quant import SCHEMES, read_fp8_block
from inferplane.types import Shard
from tests.e2e.checkpoints import edit_config
from tests.unit.gguf.files import llama, write
from tests.unit.quant.test_packed_checkpoints import two_folders

PROMPT = [[5 + 3 * i % 23 for i in range(55)]]
"""Ids that every vocabulary here has."""


def run(folder, scheme, dtype="float32", **options):
    """Logits, formats of the weights, and what was requantized."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)
        llm = LLM(folder, device="cpu", dtype=dtype, quantization=scheme, **options)
    with llm:
        assert not llm.runner.loaded.unused
        formats = {w.format for w in llm.runner.plan.weights.values()}
        return torch.as_tensor(llm.logits(PROMPT)[0]).float(), formats, dict(llm.runner.requantized)


def demo_with_values(folder, powers=False, dtype=torch.float32):
    """The demo model in FP8 and its twin with plain values: as stored, or with scales that are powers of two, so that
    bfloat16 holds all values."""
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    if powers:
        scales = {n: 2.0 ** t.log2().round() for n, t in tensors.items() if n.endswith("_scale_inv")}
        tensors = {**tensors, **scales}
    source, plain = DictSource(tensors), {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            tensor = read_fp8_block(source, name, Shard()).dequantize().to(dtype)
        if not name.endswith("_scale_inv"):
            plain[name] = tensor
    paths = folder / "fp8", folder / "plain"
    for path, found in zip(paths, (tensors, plain), strict=True):
        path.mkdir()
        for file in DEMO_FOLDER.glob("*.json"):
            shutil.copy(file, path)
        save_file(found, path / "model.safetensors")
    edit_config(paths[1], quantization_config=...)
    return paths


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return demo_with_values(tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_demo_model_computes_as_its_values(scheme, demo):
    got, formats, pairs = run("demo", scheme)
    want, plain_formats, none = run(demo[1], scheme)
    assert want.std() > 0.5 and (got - want).abs().max() <= 1e-5
    assert formats >= plain_formats and not none
    assert all(old == "fp8_block" for old, _ in pairs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_copy_in_bfloat16_computes_alike_where_it_holds_the_values(scheme, tmp_path):
    """Those of the demo model as published it does not: products of FP8 and float32."""
    fp8, plain = demo_with_values(tmp_path, powers=True, dtype=torch.bfloat16)
    got, want = run(fp8, scheme)[0], run(plain, scheme)[0]
    assert want.std() > 0.5 and (got - want).abs().max() <= 1e-5


def test_layers_that_predict_several_tokens(demo):
    got, _, pairs = run("demo", "weight_only_int4", mtp=True)
    want = run(demo[1], "weight_only_int4", mtp=True)[0]
    assert (got - want).abs().max() <= 1e-5
    assert pairs["fp8_block", "int4_group32"] > run("demo", "weight_only_int4")[2]["fp8_block", "int4_group32"]


@pytest.mark.parametrize(
    ("method", "bits", "group", "symmetric"),
    [
        ("gptq", 4, 128, False),
        ("awq", 4, 128, False),
        ("compressed-tensors", 4, 128, True),
        ("compressed-tensors", 8, 0, True),
    ],
)
@pytest.mark.parametrize("scheme", ["weight_only_int4", "a8w8_fp8_wint4"])
def test_packed_integers(method, bits, group, symmetric, scheme, tmp_path):
    quantized, plain = two_folders(tmp_path, "deepseek", method, bits, group, symmetric)
    got, _, pairs = run(quantized, scheme)
    want, *_ = run(plain, scheme)
    assert want.std() > 0.01 and (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert pairs


@pytest.mark.parametrize(
    ("method", "bits", "group", "symmetric", "scattered"),
    [
        ("gptq", 4, 32, True, True),
        ("gptq", 4, 32, False, True),
        ("gptq", 8, 128, False, False),
        ("compressed-tensors", 4, 32, True, True),
    ],
)
@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4"])
def test_what_is_expanded_is_quantized_from_its_exact_values(
    method, bits, group, symmetric, scattered, scheme, tmp_path
):
    """In float16, the dtype of the scales, values were rounded twice: logits differed by 1.7e-3 of the largest."""
    quantized, plain = two_folders(tmp_path, "llama", method, bits, group, symmetric, scattered)
    (got, *_), (want, *_) = run(quantized, scheme), run(plain, scheme)
    assert want.std() > 0.01 and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL"])
def test_blocks_of_gguf(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "tiny.gguf", llama(kind))
    convert(file, tmp_path / "folder")
    (got, _, pairs), (want, *_) = (
        run(file, "a8w8", max_model_len=64),
        run(tmp_path / "folder", "a8w8", max_model_len=64),
    )
    assert want.std() > 0 and pairs
    # The tied head stays as the file has it, and the folder's is quantized: the rest is alike.
    assert torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1] > 0.999


def test_warnings_name_what_does_not_become_smaller(tmp_path):
    quantized, _ = two_folders(tmp_path, "llama", "gptq", 4, 128, True)
    with pytest.warns(InferplaneWarning, match="take more memory.* from int4_group to int8_group"):
        LLM(quantized, device="cpu", dtype="bfloat16", quantization="weight_only_int8").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM("demo", device="cpu", dtype="bfloat16", quantization="weight_only_int4").close()


def test_dummy_weights_have_the_schemes_formats(tmp_path):
    shutil.copy(DEMO_FOLDER / "config.json", tmp_path)
    options = {"device": "cpu", "load_format": "dummy", "quantization": "weight_only_int4", "dtype": "bfloat16"}
    with LLM(json.loads((tmp_path / "config.json").read_text()), **options) as dummy, LLM("demo", **{
        **options, "load_format": "auto",
    }) as real:  # fmt: skip
        plans = [sorted((w.parts, w.format) for w in llm.runner.plan.weights.values()) for llm in (dummy, real)]
        assert plans[0] == plans[1]
        assert dummy.runner.requantized == real.runner.requantized
