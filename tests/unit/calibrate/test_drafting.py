"""Prediction layers (MTP) are calibrated as they run in the engine: on the hidden states of the quantized model, and on
the tokens behind them."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from inferplane.calibrate import calibrate, load_methods, make_recipe, rotate
from inferplane.calibrate.calibrator import Calibrator
from inferplane.calibrate.drafting import PredictionLayer
from inferplane.calibrate.layers import Hidden, LayeredModel, bind, make_cache, make_step, run_layer
from inferplane.engine import ModelFiles
from inferplane.engine.runner.exports.export import export_model
from inferplane.engine.runner.loading import weight_loading
from inferplane.engine.runner.model_files import ModelFiles as RunnerFiles
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import InferplaneWarning, UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.registry import build
from inferplane.models.writing.quantize import quantize_checkpoint
from inferplane.plugins import host
from inferplane.quant import READERS
from inferplane.types.batch import Query, make_batch
from tests.e2e.drafters import mtp_alone, with_mtp
from tests.e2e.test_mtp import write as write_modules
from tests.e2e.tiny_models import deepseek_config, random_model
from tests.unit.calibrate.test_run import METHODS, origin_of, settings_of, tensors_of, write

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 200}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
MTP = {"method": "mtp", "num_speculative_tokens": 3}
PROMPTS = [[(7 * i + 3 * k) % 150 for i in range(40 + k)] for k in range(3)]
LAYERS = 2


@pytest.fixture
def model(tmp_path):
    """A small DeepSeek-V3 with a prediction layer that is right now and then."""
    config = deepseek_config(num_hidden_layers=LAYERS, vocab_size=160)
    random_model(config, seed=3).save_pretrained(tmp_path / "model")
    with_mtp(tmp_path / "model", follows_tokens=True)
    return tmp_path / "model"


def add_scales(model, folder, kv_dtype, *names, scheme=None, vocab=160):
    settings = settings_of(*names, vocab=vocab, quantizes_weights=bool(scheme))
    partial = folder.with_name(folder.name + ".calibration")
    quantize_checkpoint(
        origin_of(model), scheme, folder, "test", None, lambda copy: calibrate(copy, settings, partial), None, kv_dtype
    )
    return settings


def scales_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name: t.item() for name, t in tensors.items() if name.endswith((".k_scale", ".v_scale"))}


def drop_scales(folder, layer=LAYERS):
    tensors = load_file(folder / "model.safetensors")
    left = {n: t for n, t in tensors.items() if not (n.startswith(f"model.layers.{layer}.") and n.endswith("_scale"))}
    save_file(left, folder / "model.safetensors")


def test_a_prediction_layer_computes_what_its_op_does(model):
    files = ModelFiles(model)
    tree = build(Build(files.config_of_tensors(), positions=64, mtp=True))
    layered = LayeredModel(tree, files.source(), READERS)
    op, ids = tree.mtp[0], PROMPTS[0]
    layer, draw = PredictionLayer(op), torch.Generator().manual_seed(1)
    hidden = torch.randn(len(ids), 64, generator=draw)
    (embedded,) = layered.embed([ids])
    values = layered.load(layer)
    found = run_layer(layer, bind(layer, values), Hidden(embedded.x, hidden), ids)
    (normed,) = layered.norm(op.norm, [found])
    _, want = bind(op, layered.load(op))(hidden, make_step(ids), make_cache(op, len(ids)))
    assert torch.equal(normed, want)
    assert not {id(op.head.weight), id(op.embed.weight), id(op.norm.norm.weight)} & values.keys()


def run_predicting(llm, ids, count):
    """What the prediction layers of a model return of a prompt, by the engine's kernels: each one's normed hidden
    states, and the rows that its cache stores."""
    runner, found = llm.engine.runner, []
    tokens, device = runner.cache.block_tokens, runner.backend.torch_device_indexed
    blocks = list(range(-(-len(ids) // tokens)))
    step = make_batch([Query(ids, 0, blocks)], block_tokens=tokens, device=device)
    _, hidden = runner.run(step)
    for number in range(count):
        left = ids[number + 1 :]
        step = make_batch([Query(left, 0, blocks)], block_tokens=tokens, device=device)
        cache = runner.draft_cache(number)
        _, hidden = runner.draft_layer(number)[step.kind](hidden[: len(left)], step, cache)
        (entries,) = cache.export(torch.tensor(blocks))
        found.append((hidden, entries.flatten(0, 1)[: len(left)]))
    return found


def test_its_scale_reaches_what_its_cache_stores_in_the_engine(model, tmp_path):
    """Other positions, tokens or hidden states would be other entries. Those of the layers before it are rounded."""
    settings = add_scales(model, tmp_path / "copy", "fp8")
    with LLM(model, **OPTIONS, mtp=True) as llm:
        largest = max(run_predicting(llm, ids, 1)[0][1].abs().max().item() for ids in settings.windows)
    scales = scales_of(tmp_path / "copy")
    assert scales[f"model.layers.{LAYERS}.self_attn.k_scale"] == pytest.approx(largest / 448, rel=0.02)


@pytest.mark.parametrize("scheme", [None, "a8w8"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_tokens_are_those_of_plain_decoding(kv_dtype, scheme, model, tmp_path):
    add_scales(model, tmp_path / "copy", kv_dtype, *(["nearest"] if scheme else []), scheme=scheme)
    scales = scales_of(tmp_path / "copy")
    texts = []
    for drafts in (None, MTP):
        options = {"kv_cache_dtype": f"{kv_dtype}_static", "speculative_config": drafts}
        with LLM(tmp_path / "copy", **OPTIONS, **options) as llm:
            texts.append([result.token_ids for result in llm.generate(PROMPTS, GREEDY)])
            given = [kv.scale_values for kv in llm.engine.runner.cache.layers]
            assert given == [(scales[f"model.layers.{i}.self_attn.k_scale"],) for i in range(len(given))]
    assert len(given) == LAYERS + 1 and texts[0] == texts[1]


def test_its_weights_are_calibrated(model, tmp_path):
    """GPTQ loses less than rounding of what the layer returns, and the card has it by itself."""
    tensors, project = load_file(model / "model.safetensors"), f"model.layers.{LAYERS}.eh_proj.weight"
    tensors[project] = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)) / 8
    save_file(tensors, model / "model.safetensors")
    errors = {}
    for name in ("nearest", "gptq"):
        settings = settings_of(vocab=160)
        settings = type(settings)(make_recipe([name], load_methods(host().calibration())), settings.windows)
        write(origin_of(model), tmp_path / name, settings, "weight_only_int4")
        card = (tmp_path / name / "README.md").read_text()
        errors[name] = float(card.partition("; prediction layers (MTP): ")[2].split(".\n")[0])
    assert 0 < errors["gptq"] < 0.8 * errors["nearest"]
    got, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("gptq", "nearest"))
    for product in ("eh_proj", "self_attn.o_proj"):
        name = f"model.layers.{LAYERS}.{product}.weight_packed"
        assert not torch.equal(got[name], rounded[name])


def test_rounding_to_nearest_is_the_same_with_texts_and_without(model, tmp_path):
    quantize_checkpoint(origin_of(model), "a8w8", tmp_path / "plain", "test")
    write(origin_of(model), tmp_path / "calibrated", settings_of("nearest", vocab=160))
    assert tensors_of(tmp_path / "plain") == tensors_of(tmp_path / "calibrated")


def test_each_of_several_reads_the_one_before(tmp_path):
    """And one that the config counts and the files lack is left out."""
    config, tensors = write_modules(tmp_path / "model")
    add = settings_of(vocab=config["vocab_size"])
    files = origin_of(tmp_path / "model")
    tree = build(Build(files.config, positions=64, mtp=True))
    layered = LayeredModel(tree, files.source, READERS)
    calibrator = Calibrator(layered, add.windows, lambda name: "plain", {}, make_recipe(["nearest"], METHODS))
    calibrator.begin()
    for layer in tree.layers:
        calibrator.calibrate_layer(layer)
    for number in range(len(tree.mtp)):
        calibrator.calibrate_prediction(tree.mtp, number)
    ids = add.windows[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)
        llm = LLM(tmp_path / "model", device="cpu", dtype="float32", mtp=True)
    with llm:
        want = run_predicting(llm, ids, 2)[1][0]
    (got,) = layered.norm(tree.mtp[-1].norm, calibrator.hidden[:1])
    assert got.shape == (len(ids) - 2, config["hidden_size"]) and (got - want).abs().max() <= 1e-4 * want.abs().max()
    lacking = {n: t for n, t in tensors.items() if not n.startswith(f"model.layers.{config['num_hidden_layers'] + 1}.")}
    save_file(lacking, tmp_path / "model" / "model.safetensors")
    add_scales(tmp_path / "model", tmp_path / "copy", "int8", vocab=config["vocab_size"])
    assert len(scales_of(tmp_path / "copy")) == 2 * (config["num_hidden_layers"] + 1)


def test_without_its_scales_it_is_refused_before_weights_are_read(model, tmp_path, monkeypatch):
    add_scales(model, tmp_path / "copy", "int8")
    drop_scales(tmp_path / "copy")
    read = []
    monkeypatch.setattr(weight_loading, "load", lambda *args, **options: read.append(args))
    with pytest.raises(
        UsageError,
        match=r"A layer that drafts \(model\.layers\.2 of .*\) has no static scales, .*kv_cache_dtype out, draft by "
        r"method='ngram', or calibrate .*quantize MODEL --kv-cache int8",
    ):
        LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype="int8_static", speculative_config=MTP)
    assert not read
    monkeypatch.undo()
    with LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype="int8_static") as llm:
        before = llm.generate(PROMPTS, GREEDY)[0].token_ids
        with pytest.raises(UsageError, match="A layer that drafts"):
            llm.set_speculation(MTP)
        assert llm.generate(PROMPTS, GREEDY)[0].token_ids == before


def test_fp8_without_its_scales_has_1_and_explain_says_so(model, tmp_path):
    add_scales(model, tmp_path / "copy", "fp8")
    for note in ("", "; of 1 in layers that draft"):
        with LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype="fp8_static", speculative_config=MTP) as llm:
            scales = [kv.scale_values for kv in llm.engine.runner.cache.layers]
            assert llm.explain()["kv_scales"]["note"].partition("for V")[2] == note
        assert (scales[-1] == (1.0,)) == bool(note) and scales[0] != (1.0,)
        drop_scales(tmp_path / "copy")


@pytest.mark.parametrize("number", [None, 0])
def test_layers_in_other_files_have_the_scales_of_these(number, model, tmp_path):
    """Not those of the model's own prediction layer."""
    add_scales(model, tmp_path / "copy", "int8")
    mtp_alone(tmp_path / "copy", tmp_path / "alone", number=number)
    tensors = load_file(tmp_path / "alone" / "model.safetensors")
    (name,) = (n for n in tensors if n.endswith("k_scale"))
    save_file({**tensors, name: torch.tensor([0.125])}, tmp_path / "alone" / "model.safetensors")
    alone = {**MTP, "model": str(tmp_path / "alone")}
    with LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype="int8_static", speculative_config=alone) as llm:
        assert llm.engine.runner.cache.layers[-1].scale_values == (0.125,)
        assert llm.engine.runner.cache.layers[0].scale_values != (0.125,)


def test_switching_reads_them(model, tmp_path):
    add_scales(model, tmp_path / "copy", "int8")
    want = scales_of(tmp_path / "copy")[f"model.layers.{LAYERS}.self_attn.k_scale"]
    with LLM(tmp_path / "copy", **OPTIONS, kv_cache_dtype="int8_static") as llm:
        plain = llm.generate(PROMPTS, GREEDY)[0].token_ids
        llm.set_speculation(MTP)
        assert [kv.scale_values for kv in llm.engine.runner.cache.layers][LAYERS] == (want,)
        assert llm.generate(PROMPTS, GREEDY)[0].token_ids == plain


def test_an_export_brings_them(model, tmp_path):
    add_scales(model, tmp_path / "copy", "int8")
    want = scales_of(tmp_path / "copy")[f"model.layers.{LAYERS}.self_attn.k_scale"]
    export_model(RunnerFiles(tmp_path / "copy"), host(), "cpu", RunnerOptions(dtype="float32"), tmp_path / "export")
    with LLM(tmp_path / "export", device="cpu", kv_cache_dtype="int8_static", speculative_config=MTP) as llm:
        assert llm.engine.runner.cache.layers[-1].scale_values == (want,)


def test_a_rotation_is_refused(model):
    """The layer reads the stream behind the final norm, whose gain no rotation passes."""
    with pytest.raises(UnsupportedModelError, match="has prediction layers, which read the residual stream"):
        rotate(origin_of(model), PROMPTS[0])
