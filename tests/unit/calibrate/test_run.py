"""Calibrating a model for a copy: what is written, going on after a kill, and what is refused."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane.calibrate import (
    CalibrationSettings,
    Method,
    calibrate,
    draw_windows,
    load_methods,
    make_recipe,
    read_texts,
    slice_windows,
)
from inferplane.calibrate.catalog import make_clip, make_gptq, make_quantease
from inferplane.calibrate.partial import PartialCalibration
from inferplane.calibrate.texts import Text
from inferplane.engine import ModelFiles
from inferplane.errors import CheckpointError, PluginError, UnsupportedModelError, UsageError
from inferplane.models.writing.fused_names import list_parts
from inferplane.models.writing.model_to_quantize import ModelToQuantize
from inferplane.models.writing.quantize import QuantizedCopy, quantize_checkpoint
from inferplane.plugins import host
from inferplane.quant.online import quantize
from tests.e2e.tiny_models import llama_config, random_model
from tests.families.cases import CASES, make


def smooth(channels):
    return (channels.act_max().clamp_min(1e-5) / channels.weight_max().clamp_min(1e-5)).sqrt().clamp(1e-3, 1e3)


METHODS = {
    "nearest": Method("round", lambda product: quantize(product.weight, product.format), ""),
    "smooth": Method("scale", smooth, ""),
    "other": Method("scale", smooth, ""),
}


def origin_of(model):
    files = ModelFiles(model)
    return ModelToQuantize(str(model), files.config_of_tensors(), files.source(), files.folder, files.weight_files())


def settings_of(*names, vocab=512, **more) -> CalibrationSettings:
    draw = torch.Generator().manual_seed(2)
    windows = [torch.randint(0, vocab, (48,), generator=draw).tolist() for _ in range(3)]
    return CalibrationSettings(make_recipe(names, METHODS), windows, **more)


def write(origin, folder, settings, scheme="a8w8", progress=None):
    partial = folder.with_name(folder.name + ".calibration")
    return quantize_checkpoint(
        origin, scheme, folder, "test", None, lambda copy: calibrate(copy, settings, partial, None, progress)
    )


def tensors_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("model", ["demo", "qwen2_moe", "phi3", "gemma2"])
def test_rounding_to_nearest_is_the_same_with_texts_and_without(model, tmp_path):
    """Whatever is fused, stacked or stored as one: each part gets its own rows."""
    folder = model
    if model != "demo":
        folder = tmp_path / "model"
        make(model, next(iter(CASES[model])), folder)
    origin = origin_of(folder)
    quantize_checkpoint(origin, "a8w8", tmp_path / "plain", "test")
    vocab = ModelFiles(folder).config["vocab_size"]
    write(origin, tmp_path / "calibrated", settings_of("nearest", vocab=vocab))
    assert tensors_of(tmp_path / "plain") == tensors_of(tmp_path / "calibrated")
    card = (tmp_path / "calibrated" / "README.md").read_text()
    assert "calibrated (nearest) on 3 windows, 144 tokens, with seed 0." in card


@pytest.mark.parametrize(("hidden", "inner"), [(64, 112), (128, 200)])
def test_blocks_of_fp8_do_not_hold_rows_of_two_tensors(hidden, inner, tmp_path):
    """Rows of q, k, v, gate and up that are no multiple of 128."""
    config = llama_config(hidden_size=hidden, intermediate_size=inner, num_attention_heads=4, num_key_value_heads=2)
    random_model(config).save_pretrained(tmp_path / "model")
    origin = origin_of(tmp_path / "model")
    quantize_checkpoint(origin, "a8w8_fp8", tmp_path / "plain", "test")
    write(origin, tmp_path / "calibrated", settings_of("nearest", vocab=60), "a8w8_fp8")
    assert tensors_of(tmp_path / "plain") == tensors_of(tmp_path / "calibrated")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A copy that was calibrated without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "copy"
    write(origin_of("demo"), folder, settings_of("smooth"))
    return folder


@pytest.mark.parametrize("last", [1, 3, 7, 8])
def test_goes_on_where_it_was_ended(last, whole, tmp_path):
    """With the same bytes; nothing appears under the result's name before the end."""
    origin, settings = origin_of("demo"), settings_of("smooth")
    layers = []

    def end(done: int, total: int) -> None:
        layers.append(done)
        if done == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(origin, tmp_path / "copy", settings, progress=end)
    assert not (tmp_path / "copy").exists()
    # Killed while the next layer was written, too.
    (tmp_path / "copy.calibration" / f"layer-{last:04}.partial").write_bytes(b"half")
    ended = len(layers)
    write(origin, tmp_path / "copy", settings, progress=lambda done, total: layers.append(done))
    assert layers[ended:] == list(range(1, 10))  # eight layers, and one that predicts
    assert tensors_of(tmp_path / "copy") == tensors_of(whole)


def test_other_settings_do_not_go_on(tmp_path):
    origin = origin_of("demo")

    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(origin, tmp_path / "copy", settings_of("smooth"), progress=end)
    for other in (settings_of("nearest"), settings_of("smooth", seed=1), settings_of("smooth", vocab=100)):
        with pytest.raises(CheckpointError, match="began with other settings"):
            write(origin, tmp_path / "copy", other)
    (tmp_path / "copy.calibration" / "layer-0000.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"layer-0000\.safetensors is damaged"):
        write(origin, tmp_path / "copy", settings_of("smooth"))
    assert [path.name for path in tmp_path.iterdir()] == ["copy.calibration"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    held = tmp_path / "copy.calibration"
    held.mkdir()
    (held / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="something else than a calibration"):
        write(origin_of("demo"), tmp_path / "copy", settings_of("nearest"))
    assert [path.name for path in tmp_path.iterdir()] == ["copy.calibration"]
    assert (held / "notes.txt").read_text() == "mine"


def test_rescaled_channels_lose_less_where_some_are_large(tmp_path):
    """Function-preserving: a norm's channel is made large, the columns behind it small."""
    make("llama", "gqa", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in list(tensors):
        if name.endswith("input_layernorm.weight"):
            layer = name.removesuffix("input_layernorm.weight")
            tensors[name][5] *= 64
            for part in "qkv":
                tensors[f"{layer}self_attn.{part}_proj.weight"][:, 5] /= 64
    save_file(tensors, path, {"format": "pt"})
    vocab = ModelFiles(tmp_path / "model").config["vocab_size"]
    errors = {}
    for name in ("nearest", "smooth"):
        settings = settings_of(name, vocab=vocab)
        partial = tmp_path / f"{name}.calibration"
        write(origin_of(tmp_path / "model"), tmp_path / name, settings)
        errors[name] = sum(report.error for report in PartialCalibration(partial).reports())
    assert errors["smooth"] < errors["nearest"] / 4


def test_changed_parts_of_what_is_stored_as_one_are_written(tmp_path):
    """Biases of q, k and v in one tensor: the values' part is divided where the output projection is multiplied."""
    make("llama", "gqa", tmp_path / "model", attention_bias=True)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    draw = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(value.shape, generator=draw) if name.endswith("v_proj.bias") else value
        for name, value in tensors.items()
    }
    save_file(tensors, path, {"format": "pt"})
    vocab = ModelFiles(tmp_path / "model").config["vocab_size"]
    origin = origin_of(tmp_path / "model")
    write(origin, tmp_path / "copy", settings_of("smooth", vocab=vocab))
    after = load_file(tmp_path / "copy" / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.bias"
    assert not torch.equal(after[name], tensors[name])
    shown = Renamed({f"{n}.bias": v for n, v in {"a.q_proj": 1, "a.k_proj": 2, "a.v_proj": 3}.items()})
    assert list_parts("a.qkv_proj.bias") == list(shown.values)
    copy = QuantizedCopy(origin, "a8w8")
    copy.calibrated = shown
    assert copy._find_changed("a.qkv_proj.bias").tolist() == [1, 2, 3]
    with pytest.raises(UnsupportedModelError, match=r"3 calibrated tensors have no place in the copy, first a\.k_proj"):
        next(copy.tensors(None))


class Renamed:
    """Calibrated tensors of a model that is another one."""

    how, paragraphs = "", ()

    def __init__(self, values):
        self.values = {name: torch.tensor([float(value)]) for name, value in values.items()}

    def names(self):
        return self.values.keys()

    def quantized(self, name):
        return None

    def plain(self, name):
        return self.values.get(name)


def test_experts_that_few_tokens_reach_are_calibrated_on_the_inputs_of_all(tmp_path):
    """Also those that none reached."""
    seen = []

    def watch(product):
        seen.append((product.weight.shape, product.inputs.rows, product.inputs.power.sum().item()))
        return quantize(product.weight, product.format)

    make("qwen2_moe", next(iter(CASES["qwen2_moe"])), tmp_path / "model")
    vocab = ModelFiles(tmp_path / "model").config["vocab_size"]
    settings = settings_of(vocab=vocab)
    recipe = make_recipe(["watch"], {"watch": Method("round", watch, "")})
    write(origin_of(tmp_path / "model"), tmp_path / "copy", CalibrationSettings(recipe, settings.windows))
    assert len(seen) > 10 and all(power > 0 for _, _, power in seen)


@pytest.mark.parametrize(
    ("windows", "what"),
    [
        ([], "No windows"),
        ([[1] * 15], "15 tokens"),
        ([[1] * 20, [4096] * 20], "token 4096"),
        ([[1] * 2049], "2048 positions"),
    ],
)
def test_windows_that_do_not_fit(windows, what, tmp_path):
    settings = CalibrationSettings(make_recipe([], METHODS), windows)
    with pytest.raises(UsageError, match=what):
        write(origin_of("demo"), tmp_path / "copy", settings)
    assert not list(tmp_path.iterdir())


def test_methods_by_name():
    assert make_recipe(["smooth", "nearest"], METHODS).names == ("smooth", "nearest")
    with pytest.raises(UsageError, match=r"--method 'gptk'"):
        make_recipe(["gptk"], METHODS)
    with pytest.raises(UsageError, match="smooth and other both choose scales"):
        make_recipe(["smooth", "other"], METHODS)
    assert {"nearest", "clip", "gptq", "quantease", "smoothquant", "pss", "awq", "shift", "rotate"} <= load_methods(
        host().calibration()
    ).keys()
    with pytest.raises(PluginError, match="'mine' is a dict"):
        load_methods({"mine": dict})


def test_texts(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.md").write_text("alpha")
    (tmp_path / "folder" / "b.jsonl").write_text('{"text": "be"}\n\n{"text": "ta", "id": 3}\n')
    (tmp_path / "folder" / "c.txt.gz").write_bytes(gzip.compress("gämma".encode()))
    (tmp_path / "folder" / "d.bin").write_bytes(b"\xff\x00")
    assert [each.text for each in read_texts([tmp_path / "folder"])] == ["alpha", "be\nta", "gämma"]
    for name, data in (("bad.txt", b"\xff\xfe"), ("bad.gz", b"no"), ("bad.jsonl", b'{"words": 1}'), ("empty.txt", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=r"cannot be read as text|not JSON lines|hold no text"):
            read_texts([tmp_path / name])
    with pytest.raises(UsageError, match="no such file"):
        read_texts([tmp_path / "nothing"])


def test_windows_are_drawn_without_overlap():
    def encode(text: str) -> list[int]:
        return [7, *map(ord, text)]

    texts = [Text("a", "x" * 25), Text("b", "abcdefgh" * 4)]
    whole = slice_windows(texts, encode, 9)
    assert all(len(window.ids) == 9 and window.ids[0] == 7 for window in whole)
    assert [window.name for window in whole] == ["a"] * 3 + ["b"] * 4
    found = draw_windows(whole, 100, seed=1)
    assert sorted(found) == sorted(whole) != found
    assert found == draw_windows(whole, 100, seed=1) != draw_windows(whole, 100, seed=2)
    assert draw_windows(whole, 2, seed=1) == found[:2]
    with pytest.raises(UsageError, match="No text of --data has 64 tokens"):
        slice_windows(texts, encode, 64)


def test_the_verb(tmp_path, monkeypatch, capsys):
    from inferplane.cli.main import main

    monkeypatch.setattr("inferplane.cli.main.prepare", lambda environment: None)
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 60)
    command = ["quantize", "demo", "--quantization", "a8w8", "--out", str(tmp_path / "copy"), "--json"]
    more = ["--data", str(text), "--method", "nearest", "--windows", "3", "--window-tokens", "32"]
    assert main([*command, *more]) == 0
    assert json.loads(capsys.readouterr().out)["weights"]["int8_row"] > 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "text.txt"]
    assert main([*command, "--method", "clip"]) == 2
    assert "--method needs texts" in capsys.readouterr().err


@pytest.mark.parametrize("method", [make_gptq, make_quantease, make_clip])
def test_joined_weights_share_a_factor_in_nvfp4(method, tmp_path):
    model = random_model(llama_config(hidden_size=64, intermediate_size=128))
    model.model.layers[0].self_attn.k_proj.weight.data *= 7
    model.model.layers[1].mlp.up_proj.weight.data *= 40
    model.save_pretrained(tmp_path / "model")
    windows = [torch.randint(0, 60, (48,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
    settings = CalibrationSettings(make_recipe(("it",), {"it": method()}), windows)
    write(origin_of(tmp_path / "model"), tmp_path / "copy", settings, "weight_only_nvfp4")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    scales = {name: value for name, value in tensors.items() if name.endswith("_global_scale")}
    assert len(scales) > 12 and len({value.item() for value in scales.values()}) > 1
    for name, value in scales.items():
        joined = name.replace("gate_proj", "up_proj").replace("q_proj", "k_proj").replace("v_proj", "k_proj")
        assert value == scales[joined], name
