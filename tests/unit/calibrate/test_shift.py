"""Shifting channels behind layer norms with biases: logits stay, outliers to one side go, and what cannot be shifted is
refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from inferplane import LLM
from inferplane.calibrate import CalibrationSettings, calibrate, load_methods, make_recipe, shifts
from inferplane.calibrate import calibrator as calibrator_module
from inferplane.calibrate.layers import bind, run_layer
from inferplane.calibrate.observe import NormReaders, ProductObserver
from inferplane.calibrate.shifts import ChannelShift, NormRanges, check_shifts, find_shifts
from inferplane.cli import main
from inferplane.errors import UnsupportedModelError, UsageError
from inferplane.models.writing.quantize import quantize_checkpoint
from inferplane.plugins import host
from tests.e2e.tiny_models import logits_of
from tests.families.cases import make
from tests.unit.calibrate.test_layers import layered, logits_by_layers
from tests.unit.calibrate.test_run import origin_of, tensors_of

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 200}
SHIFTED = {"starcoder2": 2, "phimoe": 1}
"""Families whose norms and products have biases -> such norms of a layer: of Phi-3.5-MoE the one before attention."""
BIASED = {"starcoder2": "bias", "phimoe": "biases"}
REFUSED = {"llama": "gqa", "qwen2": "tied", "gemma2": "caps", "cohere": "tied", "starcoder2": "window", "phimoe": "odd"}
"""Families and configs with RMS norms, with layer norms without a bias, or with products without one."""
VOCAB = 160


def random_ids(count: int, seed: int = 3, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_biased(family: str, folder, dtype=torch.float32) -> torch.nn.Module:
    """A model with biases, those of norms far to one side in every eighth channel, as in models with outliers."""
    model = make(family, BIASED[family], folder, vocab_size=VOCAB).to(dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(".bias"):
                value.copy_(0.3 * torch.randn(value.shape, generator=draw))
            if name.endswith("input_layernorm.bias"):
                value[::8] += 20.0
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", SHIFTED)
def test_logits_stay(family, tmp_path):
    """To 1e-5 of the largest, with the shifts that the method chooses and with larger ones."""
    reference = make_biased(family, tmp_path)
    model, ids = layered(tmp_path), random_ids(40)
    want = logits_of(reference, ids)
    method, found = load_methods(host().calibration())["shift"], []
    for factor in (1.0, 4.0):

        def shift_all(layer, values, hidden, ids, factor=factor) -> None:
            readers = NormReaders()
            weights = [w for _, w in layer.weights() if len(w.shape) > 1 and w.parts]
            with ProductObserver(values, weights, readers.see):
                run_layer(layer, bind(layer, values, readers.around), hidden, ids)
            here = find_shifts(layer, readers.found)
            ranges = NormRanges([shift.norm for shift in here])
            run_layer(layer, bind(layer, values, ranges.around), hidden, ids)
            for shift in here:
                least, largest = (torch.stack(each[shift.norm]) for each in (ranges.least, ranges.largest))
                assert least.shape == largest.shape == (1, 64)
                z = method.run(least, largest)
                assert torch.allclose(z, (least + largest)[0] / 2)
                applied = shifts.apply(shift, values, factor * z)
                assert (applied - factor * z).abs().max() <= 2**-7 * (factor * z).abs().max()
                found.append(shift)

        got = logits_by_layers(model, ids, shift_all)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert len(found) == 2 * SHIFTED[family] * len(model.model.layers)


def write(model, folder, *names, progress=None, vocab=VOCAB):
    windows = [random_ids(48, seed, vocab) for seed in range(3)]
    settings = CalibrationSettings(make_recipe(names, load_methods(host().calibration())), windows)
    partial = folder.with_name(folder.name + ".calibration")
    quantize_checkpoint(
        origin_of(model), "a8w8", folder, "test", None, lambda copy: calibrate(copy, settings, partial, None, progress)
    )
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("family", SHIFTED)
def test_outliers_to_one_side_cost_less(family, tmp_path):
    """In int8 with a scale a token, alone and before scales of channels and GPTQ."""
    reference = make_biased(family, tmp_path / "model")
    ids, errors = random_ids(64, 9), {}
    want = logits_of(reference, ids)
    for names in ("nearest", "shift,nearest", "smoothquant,gptq", "shift,smoothquant,gptq"):
        card = write(tmp_path / "model", tmp_path / names, *names.split(","))
        count = reference.config.num_hidden_layers * (2 if family == "starcoder2" else 1)
        said = f"Channels were shifted behind {count} norms, which changes results by no more than biases in the"
        assert (said in card) == ("shift" in names) and f"calibrated ({', '.join(names.split(','))})" in card
        with LLM(tmp_path / names, **OPTIONS) as llm:
            errors[names] = ((llm.logits([ids])[0] - want).square().mean() / want.square().mean()).item()
    assert errors["shift,nearest"] < 0.75 * errors["nearest"], errors  # what is left are other products' errors
    assert errors["shift,smoothquant,gptq"] < 0.6 * errors["smoothquant,gptq"], errors


def test_biases_are_those_that_are_stored(tmp_path):
    """In bfloat16: what is written is what the layers behind were calibrated on, and what is read back."""
    make_biased("starcoder2", tmp_path / "model", torch.bfloat16)
    write(tmp_path / "model", tmp_path / "copy", "shift", "nearest")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "copy"))
    changed = {n for n, t in before.items() if n.endswith(".bias") and not torch.equal(t, after[n])}
    ends = ("input_layernorm.bias", *(f"self_attn.{part}_proj.bias" for part in "qkv"))
    ends += ("post_attention_layernorm.bias", "mlp.c_fc.bias")
    assert changed == {f"model.layers.{i}.{end}" for i in range(3) for end in ends}
    assert all(after[name].dtype is torch.bfloat16 for name in changed)


def test_goes_on_where_it_was_ended_with_the_same_bytes(tmp_path):
    make_biased("starcoder2", tmp_path / "model")
    names = ("shift", "smoothquant", "gptq")
    write(tmp_path / "model", tmp_path / "whole", *names)

    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model", tmp_path / "copy", *names, progress=end)
    write(tmp_path / "model", tmp_path / "copy", *names)
    assert tensors_of(tmp_path / "copy") == tensors_of(tmp_path / "whole")


def test_a_shift_that_changes_a_result_is_undone(tmp_path, monkeypatch):
    """Such as one of which a reader was missed: all tensors are those of a copy without it."""
    make_biased("starcoder2", tmp_path / "model")
    write(tmp_path / "model", tmp_path / "plain", "nearest")
    monkeypatch.setattr(
        calibrator_module,
        "find_shifts",
        lambda *args: [ChannelShift(shift.norm, shift.read_by[1:]) for shift in find_shifts(*args)],
    )
    # No product gives the shift back: it is chosen all the same, where any weight is quantized.
    monkeypatch.setattr(calibrator_module, "any", lambda found: True, raising=False)
    card = write(tmp_path / "model", tmp_path / "copy", "shift", "nearest")
    assert tensors_of(tmp_path / "copy") == tensors_of(tmp_path / "plain") and "Channels were shifted" not in card
    assert "6 norms were not shifted: float32 results would change." in card


@pytest.mark.parametrize("family", REFUSED)
def test_models_without_such_biases_are_refused(family, tmp_path):
    make(family, REFUSED[family], tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"cannot be shifted: the bias of a norm .*smoothquant,gptq"):
        write(tmp_path / "model", tmp_path / "copy", "shift", "nearest", vocab=50)
    assert not (tmp_path / "copy").exists() and not (tmp_path / "copy.calibration").exists()


@pytest.mark.parametrize("family", SHIFTED)
def test_models_with_them_are_not(family, tmp_path):
    make_biased(family, tmp_path)
    check_shifts("a model", layered(tmp_path).model.layers)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    words = ["quantize", "demo", "--quantization", "a8w8", "--data", str(tmp_path / "text.txt"), "--out"]
    assert main.main([*words, str(tmp_path / "copy"), "--method", "shift,gptq"]) != 0
    assert "demo cannot be shifted: " in capsys.readouterr().err
    words[3] = "weight_only_int4"
    assert main.main([*words, str(tmp_path / "copy"), "--method", "shift,gptq"]) != 0
    assert "this scheme quantizes weights alone" in capsys.readouterr().err
    with pytest.raises(UsageError, match="shift and shift both shift channels"):
        make_recipe(["shift", "shift"], load_methods(host().calibration()))
