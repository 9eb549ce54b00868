"""Static scales of the cache by calibration: what is observed and written, beside weights or alone, and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from inferplane import LLM, SamplingParams
from inferplane.calibrate import calibrate
from inferplane.calibrate.kv_scales import SHARES, KVCalibration
from inferplane.calibrate.partial import PartialCalibration
from inferplane.cli import main
from inferplane.engine import ModelFiles
from inferplane.errors import InferplaneWarning, UnsupportedModelError, UsageError
from inferplane.models.writing.quantize import quantize_checkpoint
from inferplane.types import KVRequest
from tests.families.cases import CASES, make
from tests.unit.calibrate.test_run import origin_of, settings_of

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 200}
LIMITS = {"int8": 127.0, "fp8": 448.0}


@pytest.fixture
def llama(tmp_path):
    make("llama", "gqa", tmp_path / "llama")
    return tmp_path / "llama"


def write(model, folder, *names, kv_dtype="int8", scheme=None, progress=None):
    origin = origin_of(model)
    settings = settings_of(*names, vocab=ModelFiles(model).config["vocab_size"], quantizes_weights=bool(scheme))
    partial = folder.with_name(folder.name + ".calibration")

    def run(copy):
        return calibrate(copy, settings, partial, None, progress)

    quantize_checkpoint(origin, scheme, folder, "test", None, run, None, kv_dtype)
    return settings


def scales_of(folder):
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if name.endswith("_scale")}


def stored_entries(model, windows):
    """What the layers' caches of a float32 model hold of some windows: the largest entry of K and of V by layer."""
    largest: dict[int, list[float]] = {}
    with LLM(model, **OPTIONS) as llm:
        for ids in windows:
            llm.generate([ids], SamplingParams(max_tokens=1))
            for i, kv in enumerate(llm.engine.runner.cache.layers):
                parts = kv.export(torch.arange(kv.blocks))
                found = largest.setdefault(i, [0.0] * len(parts))
                largest[i] = [max(a, t.abs().max().item()) for a, t in zip(found, parts)]
    return largest


def test_fp8_reaches_the_largest_entry_that_the_cache_stores(llama, tmp_path):
    """Keys as they are after their rotation."""
    settings = write(llama, tmp_path / "copy", kv_dtype="fp8")
    got = scales_of(tmp_path / "copy")
    want = stored_entries(llama, settings.windows)
    full = {f"model.layers.{i}.self_attn.{part}_scale" for i in (0, 1) for part in "kv"}
    assert got.keys() == full and all(t.shape == (1,) and t.dtype is torch.float32 for t in got.values())
    for part, largest in zip("kv", want[0]):  # of the first layer, whose inputs are not quantized
        assert got[f"model.layers.0.self_attn.{part}_scale"].item() == pytest.approx(largest / 448, rel=1e-4)


def test_alone_weights_stay_as_they_are(llama, tmp_path):
    write(llama, tmp_path / "copy")
    before, after = (load_file(folder / "model.safetensors") for folder in (llama, tmp_path / "copy"))
    assert all(torch.equal(after[name], value) for name, value in before.items()) and len(after) == len(before) + 4
    settings = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert settings["kv_cache_scheme"] == scheme and settings["config_groups"] == {}
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "with `--kv-cache int8`: calibrated on 3 windows" in card and "\n- kv_cache_int8\n" in card
    assert "Static scales of the KV cache, one a layer: k_scale from" in card


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("scheme", ["a8w8", "weight_only_int4", "a8w8_fp8"])
def test_beside_weights(scheme, kv_dtype, tmp_path):
    """And what is written is what a cache with static scales reads."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    make("llama", "gqa", tmp_path / "llama", **sizes)
    write(tmp_path / "llama", tmp_path / "copy", "nearest", scheme=scheme, kv_dtype=kv_dtype)
    with LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype=f"{kv_dtype}_static") as llm:
        scales = [kv.scale_values for kv in llm.engine.runner.cache.layers]
        assert llm.explain()["kv_scales"]["used"]
    got = scales_of(tmp_path / "copy")
    want = [[got[f"model.layers.{i}.self_attn.{part}_scale"].item() for part in "kv"] for i in (0, 1)]
    assert [list(pair) for pair in scales] == want
    card = (tmp_path / "copy" / "README.md").read_text()
    assert f"with `--quantization {scheme} --kv-cache {kv_dtype}`: calibrated (nearest)" in card


@pytest.mark.parametrize(
    "family", ["phi3", "gemma2", "qwen2_moe", "falcon_h1", "glm4_moe_lite", "qwen3_next", "nemotron_h"]
)
def test_families(family, tmp_path):
    """Latents, projections that are stored as one, windows, experts, and layers that keep states beside."""
    make(family, next(iter(CASES[family])), tmp_path / "model")
    write(tmp_path / "model", tmp_path / "copy", kv_dtype="fp8")
    with LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype="fp8_static") as llm:
        caches = llm.engine.runner.cache.layers
        assert caches and all(kv.scale_values != (1.0,) * len(kv.scale_values) for kv in caches)


def test_goes_on_where_it_was_ended_with_the_same_bytes(llama, tmp_path):
    write(llama, tmp_path / "whole", "smooth", scheme="a8w8")

    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(llama, tmp_path / "copy", "smooth", scheme="a8w8", progress=end)
    assert len(PartialCalibration(tmp_path / "copy.calibration").reports()) == 1
    write(llama, tmp_path / "copy", "smooth", scheme="a8w8")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_copy_of_a_copy_has_its_own_scales(llama, tmp_path):
    write(llama, tmp_path / "int8", kv_dtype="int8")
    write(tmp_path / "int8", tmp_path / "fp8", kv_dtype="fp8")
    assert scales_of(tmp_path / "int8").keys() == scales_of(tmp_path / "fp8").keys()
    with pytest.warns(InferplaneWarning, match="static scales of the KV cache, which the copy has not"):
        quantize_checkpoint(origin_of(tmp_path / "int8"), "a8w8", tmp_path / "weights", "test")
    assert not [name for name in scales_of(tmp_path / "weights") if name.endswith(("k_scale", "v_scale"))]


def test_weights_of_this_format_are_not_rounded_again(llama, tmp_path):
    quantize_checkpoint(origin_of(llama), "a8w8", tmp_path / "int8", "test")
    with pytest.raises(UsageError, match=r"changes nothing: .* has these formats already"):
        write(tmp_path / "int8", tmp_path / "again", scheme="a8w8")
    assert not (tmp_path / "again").exists()


def test_of_integers_the_share_that_loses_least():
    """A single entry far beyond the others may saturate; entries of equal size may not."""
    request, draw = KVRequest("gqa", 1, 64, 64), torch.Generator().manual_seed(0)
    even = torch.randn(500, 1, 64, generator=draw).clamp(-2, 2)
    long = torch.randn(500, 1, 64, generator=draw)
    long[7, 0, 3] = 12.0
    cache = KVCalibration(request, "int8", 1)
    cache.see(even, long)
    k, v = cache.choose()
    assert k == pytest.approx(2 / 127)
    losses = {share: (rounded(long, 12 / 127 * share) - long).square().sum().item() for share in SHARES}
    best = min(losses, key=losses.__getitem__)
    assert best < 1 and v == pytest.approx(12 / 127 * best)
    assert (cache.round(even, long)[0] - even).abs().max() <= k / 2 * 1.001


def rounded(entries, scale):
    return (entries / scale).round().clamp(-127, 127) * scale


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_entries_that_are_not_finite_have_no_scale(wrong):
    cache = KVCalibration(KVRequest("gqa", 1, 64, 64), "int8", 1)
    k, v = torch.ones(4, 1, 64), torch.ones(4, 1, 64)
    v[2, 0, 1] = wrong
    cache.see(k, v)
    cache.see(k, torch.ones(4, 1, 64))
    with pytest.raises(UnsupportedModelError, match="no scale"):
        cache.choose()


def test_a_latents_two_scales():
    """That of its row, and that of what serves as values."""
    cache = KVCalibration(KVRequest("mla", 1, 96, rope=32), "fp8", 1)
    row = torch.ones(4, 96)
    row[:, 64:] = 8.0
    assert cache.see(row)[0] is row
    assert cache.choose() == pytest.approx((8 / 448, 1 / 448))
    assert cache.round(row)[0].shape == row.shape


def test_entries_of_zeros_have_a_scale():
    cache = KVCalibration(KVRequest("gqa", 1, 32, 32), "int8", 1)
    cache.see(torch.zeros(3, 1, 32), torch.zeros(3, 1, 32))
    assert min(cache.choose()) > 0 and not cache.round(torch.zeros(3, 1, 32), torch.zeros(3, 1, 32))[0].any()


def run(capsys, monkeypatch, *words):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    code = main.main(["quantize", *map(str, words)])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-cache", "int8"], "--kv-cache needs texts to calibrate on"),
        (["--kv-cache", "int4", "--data", "."], "Static scales of a KV cache in 'int4'"),
        (["--kv-cache", "int8", "--data", ".", "--method", "gptq"], "--method is for weights, and there is no scheme"),
        (["--kv-cache", "int8", "--data", ".", "--group-size", "64"], "--group-size is for weights"),
        (["--kv-cache", "int8", "--data", "."], "demo has quantized weights, which are not written as they are"),
    ],
)
def test_refusals(words, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    words = [tmp_path if word == "." else word for word in words]
    code, err = run(capsys, monkeypatch, "demo", "--out", tmp_path / "copy", *words)
    assert code != 0 and said in err and not (tmp_path / "copy").exists()


def test_without_texts_there_are_no_scales(llama, tmp_path):
    with pytest.raises(UsageError, match=r"Static scales of a KV cache in 'int8'.*--data"):
        quantize_checkpoint(origin_of(llama), None, tmp_path / "copy", "test", kv_dtype="int8")


def test_eval_and_explain_of_a_copy(tmp_path, capsys, monkeypatch):
    """The verbs, from texts to a comparison of caches; latents, for a device that is not here too."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i)\n" * 40)
    texts = ["--data", str(tmp_path / "text.txt"), "--windows", "3", "--window-tokens", "48"]
    copy = str(tmp_path / "copy")
    words = ["quantize", "demo", "--quantization", "a8w8", "--method", "nearest", "--kv-cache", "fp8", "--out", copy]
    assert main.main([*words, "--json", *texts]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"] == "fp8"
    divergence = {}
    for cache in ("auto", "fp8", "fp8_static"):
        options = ["--device", "cpu", "--kv-cache-dtype", cache, "--against", copy, "--json"]
        assert main.main(["eval", copy, *options, *texts]) == 0
        divergence[cache] = json.loads(capsys.readouterr().out)["divergence"]["value"]
    assert divergence["auto"] == 0 < divergence["fp8"] < 0.1 and 0 < divergence["fp8_static"] < 0.1
    said = {
        ("cpu", "auto"): "are not used: entries are in bfloat16; kv_cache_dtype=fp8",
        ("cpu", "fp8"): "are not used: the layout's own are computed for each token and head",
        ("cpu", "fp8_static"): "KV cache: static scales of the checkpoint (fp8), one a layer",
        ("xpu:intel", "fp8"): "KV cache: static scales of the checkpoint (fp8), one a layer",
        ("dcu", "fp8"): "KV cache: static scales of the checkpoint (fp8), one a layer",
    }
    for (device, cache), words_said in said.items():
        assert main.main(["explain", copy, "--device", device, "--kv-cache-dtype", cache]) == 0
        assert words_said in capsys.readouterr().out.replace("\n", " "), (device, cache)
