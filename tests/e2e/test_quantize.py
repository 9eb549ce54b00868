"""`inferplane quantize`: the copy has the values that quantizing on load gives, appears whole or not at all, and is
what compressed-tensors reads."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inferplane import LLM
from inferplane.cli.main import main
from inferplane.engine import ModelFiles
from inferplane.errors import CapacityError, InferplaneWarning, UnsupportedModelError, UsageError
from inferplane.models import SafetensorsFolder
from inferplane.models.writing import quantize as module
from inferplane.models.writing.compressed_form import split
from inferplane.models.writing.model_to_quantize import ModelToQuantize
from inferplane.models.writing.quantize import quantize_checkpoint
from inferplane.models.writing.safetensors_writer import PlannedTensor, SafetensorsWriter
from inferplane.ops import encode
from inferplane.quant import read_quant_config
from inferplane.quant.mxfp4 import expand_pairs
from inferplane.quant.online import quantize
from inferplane.types import Shard
from tests.e2e.checkpoints import edit_config
from tests.e2e.test_requantize import run
from tests.e2e.tiny_models import llama_config, random_model
from tests.unit.gguf.files import llama, write
from tests.unit.quant.test_packed_checkpoints import two_folders

SCHEMES = ("weight_only_int8", "weight_only_int4", "weight_only_mxfp4", "weight_only_nvfp4", "a8w8", "a8w8_fp8_wint4")
SCHEMES += ("a8w4", "a4w4", "a4w4_mxfp4")


def origin_of(model):
    files = ModelFiles(model)
    return ModelToQuantize(str(model), files.config_of_tensors(), files.source(), files.folder, files.weight_files())


def weights_of(folder):
    """Quantized weights as they are read back, by name."""
    files = ModelFiles(folder)
    found = read_quant_config(files.config["quantization_config"], set(files.names()))
    source = found.view(files.source())
    formats = {name: found.format_of(name) for name in source.names()}
    return {n: (f, found.readers[f](source, n, Shard())) for n, f in formats.items() if f != "plain"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_copy_computes_as_quantizing_on_load_does(scheme, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("inferplane.cli.main.prepare", lambda environment: None)
    out = tmp_path / "copy"
    assert main(["quantize", "demo", "--quantization", scheme, "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["folder"] == str(out) and sum(data["weights"].values()) > 200
    # With the scheme once more: a tied head in other numbers than the embedding, which no checkpoint holds, gets them.
    got, formats, pairs = run(out, scheme)
    want, wanted, _ = run("demo", scheme)
    assert (got - want).abs().max() <= 1e-5 and formats == wanted and not pairs
    alone, _, _ = run(out, None)
    assert alone.isfinite().all() and torch.corrcoef(torch.stack((alone.flatten(), want.flatten())))[0, 1] > 0.99
    assert (out / "tokenizer.json").read_bytes() and "SHA-256" in (out / "README.md").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_weights_that_are_expanded_while_they_are_read(tmp_path):
    """Those in integers come from exact values; those that stay plain have the config's dtype."""
    quantized, plain = two_folders(tmp_path, "deepseek", "gptq", 4, 32, True, scattered=True)
    edit_config(quantized, dtype="bfloat16", torch_dtype="bfloat16")
    with pytest.warns(InferplaneWarning, match="expanded to 16 bits"):
        quantize_checkpoint(origin_of(quantized), "weight_only_int4", tmp_path / "copy", "0")
    values, found = load_file(plain / "model.safetensors"), weights_of(tmp_path / "copy")
    assert len(found) > 8
    for name, (format, q) in found.items():
        assert torch.equal(q.dequantize(), quantize(values[name], format).dequantize()), name
    expanded = {n: t for n, t in load_file(tmp_path / "copy" / "model.safetensors").items() if "kv_b_proj" in n}
    assert expanded and {t.dtype for t in expanded.values()} == {torch.bfloat16}
    assert all(torch.equal(t, values[n].bfloat16()) for n, t in expanded.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_reads_equal_values(scheme, tmp_path):
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.ct_dequantizer")
    quantize_checkpoint(origin_of("demo"), scheme, tmp_path / "copy", "test")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    reader = converters.CompressedTensorsDequantizer(str(tmp_path / "copy"), dtype=torch.float32)
    found, ours = reader.validate(dict(tensors)), weights_of(tmp_path / "copy")
    assert len(ours) > 200
    for name, (format, q) in ours.items():  # integers are multiplied in the dtype of the scales
        dtype = torch.float32 if format in ("mxfp4", "nvfp4") else tensors[f"{name}_scale"].dtype
        assert torch.equal(found[name], q.dequantize(dtype).float()), name


def test_blocks_of_fp8_have_deepseeks_form(tmp_path):
    random_model(llama_config(hidden_size=128, intermediate_size=256)).save_pretrained(tmp_path / "plain")
    origin = origin_of(tmp_path / "plain")
    quantize_checkpoint(origin, "a8w8_fp8_wint4", tmp_path / "copy", "test")
    settings = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    assert {f for f, _ in weights_of(tmp_path / "copy").values()} == {"fp8_block"}
    assert run(tmp_path / "copy", None)[0].isfinite().all()


@pytest.mark.parametrize("scheme", ["weight_only_mxfp4", "weight_only_nvfp4"])
def test_a_head_in_int8_beside_weights_of_four_bits(scheme, tmp_path):
    """A checkpoint whose groups have different formats, one of them FP4."""
    random_model(llama_config(hidden_size=128, intermediate_size=256, tie_word_embeddings=False)).save_pretrained(
        tmp_path / "plain"
    )
    quantize_checkpoint(origin_of(tmp_path / "plain"), scheme, tmp_path / "copy", "test")
    found = {name: format for name, (format, _) in weights_of(tmp_path / "copy").items()}
    assert found.pop("lm_head.weight") == "int8_group" and set(found.values()) == {scheme.removeprefix("weight_only_")}
    assert (run(tmp_path / "copy", None)[0] - run(tmp_path / "plain", scheme)[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("scheme", ["weight_only_int4", "weight_only_mxfp4", "weight_only_nvfp4"])
def test_a_tied_head_is_quantized_at_load(scheme, tmp_path):
    """A copy has it plain, since it is the embedding too; the scheme at load quantizes it, though all else stays."""
    random_model(llama_config(hidden_size=128, intermediate_size=256, tie_word_embeddings=True)).save_pretrained(
        tmp_path / "plain"
    )
    quantize_checkpoint(origin_of(tmp_path / "plain"), scheme, tmp_path / "copy", "test")
    for head, format in (("auto", "int8_group"), ("none", "plain")):
        options = {"device": "cpu", "dtype": "bfloat16", "quantization": scheme, "max_model_len": 32}
        with LLM(str(tmp_path / "copy"), head_format=head, **options) as llm:
            assert llm.runner.model.head.weight.format == format


def test_weights_that_engines_join_share_the_factor_of_their_scales(tmp_path):
    model = random_model(llama_config(hidden_size=128, intermediate_size=256))
    layer = model.model.layers[0]
    layer.self_attn.k_proj.weight.data *= 7
    layer.mlp.gate_proj.weight.data[3, :64] *= 1e-6
    layer.mlp.up_proj.weight.data *= 40
    model.save_pretrained(tmp_path / "plain")
    quantize_checkpoint(origin_of(tmp_path / "plain"), "weight_only_nvfp4", tmp_path / "copy", "test")
    tensors, plain = load_file(tmp_path / "copy" / "model.safetensors"), load_file(tmp_path / "plain/model.safetensors")
    of = lambda module: tensors[f"model.layers.0.{module}.weight_global_scale"]  # noqa: E731
    assert of("self_attn.q_proj") == of("self_attn.k_proj") == of("self_attn.v_proj") < of("self_attn.o_proj")
    assert of("mlp.gate_proj") == of("mlp.up_proj")
    for name, (_, q) in weights_of(tmp_path / "copy").items():
        error = (q.dequantize() - plain[name].float()).norm() / plain[name].float().norm()
        assert error < 0.16, name


def test_scales_with_a_factor_of_their_own(tmp_path):
    """NVFP4 whose scales share another number than a power of two is written with the nearest scales and entries."""
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    q = encode(w, "nvfp4")
    other = replace(q, scale=q.scale * 0.7)
    for stored, least in ((q, 0.0), (other, 0.01)):
        parts = dict(split("a.weight", stored, "nvfp4", {}, deepseek=False))
        scale = parts["a.weight_scale"].float() / parts["a.weight_global_scale"] / 2
        again = replace(q, data=expand_pairs(parts["a.weight_packed"]), scale=scale).dequantize()
        error = (again - stored.dequantize()).norm() / stored.dequantize().norm()
        assert error == 0 if not least else least < error < 0.12


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_what_is_no_number_stays_so(format):
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    w[1, 3], w[2] = torch.nan, 0
    parts = dict(split("a.weight", quantize(w, format), format, {}, deepseek=False))
    scale = parts["a.weight_scale"]
    lost = scale == 255 if format == "mxfp4" else scale.float().isnan()
    assert lost.nonzero().tolist() == [[1, 0]] and (expand_pairs(parts["a.weight_packed"])[2] == 0).all()


def test_columns_that_are_no_whole_groups(tmp_path):
    """Are read by no reader of compressed-tensors: such weights get a scale a row, or stay plain."""
    random_model(llama_config(hidden_size=80, intermediate_size=256)).save_pretrained(tmp_path / "plain")
    for scheme, narrow in (("weight_only_int8", "int8_row"), ("weight_only_int4", None)):
        quantize_checkpoint(origin_of(tmp_path / "plain"), scheme, tmp_path / scheme, "test")
        found = {name: format for name, (format, _) in weights_of(tmp_path / scheme).items()}
        assert found.get("model.layers.0.mlp.up_proj.weight") == narrow
        assert found["model.layers.0.mlp.down_proj.weight"] != narrow
        assert "not whole groups" in (tmp_path / scheme / "README.md").read_text()
        assert run(tmp_path / scheme, None)[0].isfinite().all()


def test_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "tiny-Q6_K.gguf", llama("Q6_K"))
    quantize_checkpoint(origin_of(file), "weight_only_int4", tmp_path / "copy", "test")
    got = run(tmp_path / "copy", None, max_model_len=64)[0]  # its tied head is plain
    want = run(file, "weight_only_int4", max_model_len=64)[0]
    assert torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1] > 0.999


def test_what_is_refused(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        quantize_checkpoint(origin_of("demo"), "weight_only_int4", tmp_path / "there", "test")
    with pytest.raises(UsageError, match=r"'a8w8', which has the same weights.*kv_cache_dtype='int8'"):
        quantize_checkpoint(origin_of("demo"), "a8w8c8", tmp_path / "copy", "test")
    quantize_checkpoint(origin_of("demo"), "weight_only_int4", tmp_path / "copy", "test")
    with pytest.raises(UsageError, match="changes nothing"):
        quantize_checkpoint(origin_of(tmp_path / "copy"), "weight_only_int4", tmp_path / "again", "test")


def test_a_copy_that_could_not_be_read_is_refused_before_it_is_written(tmp_path):
    random_model(llama_config(hidden_size=128)).save_pretrained(tmp_path / "plain")
    origin = origin_of(tmp_path / "plain")
    entries = origin.source._entries
    del entries["model.norm.weight"]
    with pytest.raises(UnsupportedModelError, match=r"could not be read back.*model.norm.weight"):
        quantize_checkpoint(origin, "weight_only_int8", tmp_path / "copy", "test")
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    left = iter(range(100))

    def tensors(self, progress):
        for item in whole(self, progress):
            if next(left) == 50:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield item

    whole = module.QuantizedCopy.tensors
    monkeypatch.setattr(module.QuantizedCopy, "tensors", tensors)
    with pytest.raises(CapacityError, match=r"The disk of .* is full: .*takes up to 1\d\.\d MiB more, and .* are free"):
        quantize_checkpoint(origin_of("demo"), "weight_only_int4", tmp_path / "copy", "test")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CapacityError, match="the disk has 1000 B free"):
        quantize_checkpoint(origin_of("demo"), "weight_only_int4", tmp_path / "copy", "test")


def test_a_killed_process_leaves_no_folder_of_that_name(tmp_path):
    script = """
import os, signal, sys
from tests.e2e.test_quantize import origin_of, quantize_checkpoint
from dataclasses import replace
from pathlib import Path

def progress(done, total):
    if done == total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

quantize_checkpoint(origin_of("demo"), "weight_only_int4", Path(sys.argv[1]), "test", progress)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "copy"], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "copy").exists()
    assert [p.name.startswith("copy.partial-") for p in tmp_path.iterdir()] == [True]
    quantize_checkpoint(origin_of("demo"), "weight_only_int4", tmp_path / "copy", "test")
    assert run(tmp_path / "copy", None)[0].isfinite().all()


def test_several_files_and_their_index(tmp_path):
    tensors = {f"t{i}.weight": torch.randn(8, 4 + i).to(dtype) for i, dtype in enumerate(
        (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn))} | {"n": torch.tensor([3, 5])}  # fmt: skip
    planned = [PlannedTensor(name, tuple(t.shape), 4 * t.numel()) for name, t in tensors.items()]
    SafetensorsWriter(tmp_path, planned, shard_bytes=300).write(tensors.items())
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    source = SafetensorsFolder(tmp_path)
    assert not source.complaints and set(source.names()) == set(tensors)
    for path in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert tensor.dtype is tensors[name].dtype
            assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))
