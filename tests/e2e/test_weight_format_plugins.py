"""Weight formats of plugins, from a checkpoint's config to generated text; the first is the example of the docs."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams, plugins
from inferplane.calibrate import Inputs, WeightToRound, load_methods
from inferplane.errors import PluginError, UnsupportedModelError
from inferplane.types import PLAIN
from tests.e2e.tiny_models import llama_config, prompts, random_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-weight-format.md"
EXAMPLE, METHOD = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
HEAD = """
import torch
from inferplane.plugin import QTensor, WeightFormat, hookimpl, read_tensor
INFERPLANE_API = (1, 0)
def rows(source, name, shard):
    data, step = read_tensor(source, name, torch.int8), read_tensor(source, name + "_step", torch.float32)
    return QTensor(data, step[:, None], block=(1, data.shape[1]))
"""
"""A reader of int8 rows, whose scales are `MODULE.weight_step`."""
PROJECTION = re.compile(r"\.(self_attn|mlp)\.\w+_proj\.weight$")
NUMBERS = itertools.count()


def registering(target, method="acme-rows"):
    return f"{HEAD}@hookimpl\ndef inferplane_register_quantization(register): register({method!r}, {target})\n"


def nibbles(module, w):
    steps = (w.unflatten(1, (-1, 32)).abs().amax(-1) / 7).half()
    codes = (w / steps.float().repeat_interleave(32, 1)).round().clamp(-8, 7)
    stored = (codes + 8).to(torch.uint8)
    return {f"{module}.codes": stored[:, ::2] | stored[:, 1::2] << 4, f"{module}.steps": steps}, (
        codes * steps.float().repeat_interleave(32, 1)
    )


def int8_rows(module, w):
    step = w.abs().amax(1) / 127
    codes = (w / step[:, None]).round()
    return {f"{module}.weight": codes.to(torch.int8), f"{module}.weight_step": step}, codes * step[:, None]


@pytest.fixture(scope="module")
def model():
    return random_model(llama_config(intermediate_size=128), seed=4)


@pytest.fixture
def checkpoint(tmp_path, model):
    """Saves a model quantized by a function, as a checkpoint of a method, and its dequantized twin."""

    def make(method, quantize, **settings):
        folder, twin = tmp_path / "quantized", tmp_path / "twin"
        model.save_pretrained(folder), model.save_pretrained(twin)
        stored, plain = {}, load_file(twin / "model.safetensors")
        for name, w in plain.items():
            if PROJECTION.search(name):
                parts, plain[name] = quantize(name.removesuffix(".weight"), w)
                stored |= parts
            else:
                stored[name] = w
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        save_file({n: t.contiguous() for n, t in plain.items()}, twin / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, **settings}
        (folder / "config.json").write_text(json.dumps(config))
        return folder, twin

    return make


@pytest.fixture
def with_plugins(tmp_path, monkeypatch):
    """Makes modules of sources and lets models be opened with them beside the cpu backend; returns the plugin host."""

    def use(*sources):
        monkeypatch.syspath_prepend(str(tmp_path))
        names = [f"acme_format_{next(NUMBERS)}" for _ in sources]
        for name, source in zip(names, sources):
            (tmp_path / f"{name}.py").write_text(source)
        host = plugins.discover(",".join(("only", "inferplane_cpu.plugin", *names)))
        monkeypatch.setattr("inferplane.engine.clients.llm.host", lambda: host)
        return host

    return use


def generated(folder, **options):
    with LLM(folder, device="cpu", dtype="float32", **options) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return [r.token_ids for r in llm.generate(prompts(160, (9, 4)), params)], {
            w.format for _, w in llm.runner.model.weights()
        }


CASES = {
    "the example of the docs": ("acme-nibbles", nibbles, EXAMPLE, "int4_group32"),
    "a reader alone": ("acme-rows", int8_rows, registering("rows"), "acme-rows"),
    "a format": ("acme-rows", int8_rows, registering("WeightFormat(rows, kernels_format='int8_row')"), "int8_row"),
    "of settings": ("acme-rows", int8_rows, registering("lambda settings: WeightFormat(rows)"), "acme-rows"),
    "a method of core with other settings": ("gptq", int8_rows, registering("rows", "gptq"), "gptq"),
}


@pytest.mark.filterwarnings("error:.*were not read")
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_generates_as_its_dequantized_twin(case, checkpoint, with_plugins):
    method, quantize, source, format = CASES[case]
    host = with_plugins(source)
    folder, twin = checkpoint(method, quantize, bits=3)
    assert generated(folder) == (generated(twin)[0], {PLAIN, format}) and not host.list_quarantined()


def test_a_dotted_name_is_imported_for_its_method_only(checkpoint, with_plugins):
    with_plugins(registering("'surely_not_installed:read'"), registering("rows", "acme-other"))
    folder, twin = checkpoint("acme-other", int8_rows)
    assert generated(folder)[0] == generated(twin)[0]
    folder, _ = checkpoint("acme-rows", int8_rows)
    with pytest.raises(PluginError, match="surely_not_installed"):
        LLM(folder, device="cpu")


def test_an_unknown_method_is_refused_with_what_plugins_offer(checkpoint, with_plugins):
    with_plugins(EXAMPLE, registering("rows"))
    folder, _ = checkpoint("acme-bits", int8_rows)
    with pytest.raises(UnsupportedModelError, match="Quantization method 'acme-bits'") as caught:
        LLM(folder, device="cpu")
    assert "of plugins: 'acme-nibbles', 'acme-rows'" in caught.value.there_is


def test_a_plugin_refuses_settings_in_its_own_words(checkpoint, with_plugins):
    host = with_plugins(EXAMPLE)
    folder, _ = checkpoint("acme-nibbles", nibbles, columns=64)
    with pytest.raises(UnsupportedModelError, match="acme-nibbles with columns = 64") as caught:
        LLM(folder, device="cpu")
    assert caught.value.there_is == "32" and not host.list_quarantined()


FAILING = {
    "raises": ("lambda source, name, shard: 1 / 0", "ZeroDivisionError"),
    "gives no QTensor": ("lambda source, name, shard: torch.zeros(2, 2)", "returned Tensor for model.layers.0"),
    "gives another shape": (
        "lambda source, name, shard: QTensor(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1))",
        r"returned a QTensor \(2, 2\) for model.layers.0",
    ),
    "is no reader": ("lambda settings: 7", "it has 7 for a WeightFormat"),
    "fails to make one": ("lambda settings: settings['depth']", "KeyError: 'depth'"),
    "fails to choose weights": ("WeightFormat(rows, weights=lambda names: 1 / 0)", "ZeroDivisionError"),
    "fails to give a shape": ("WeightFormat(rows, shape=lambda source, name: 1 / 0)", "ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", FAILING)
def test_a_plugin_that_fails_is_quarantined_by_name(fault, checkpoint, with_plugins):
    target, words = FAILING[fault]
    host = with_plugins(registering(target))
    folder, _ = checkpoint("acme-rows", int8_rows)
    with pytest.raises(PluginError, match=f"Weight format 'acme-rows' is served by a quarantined plugin: .*{words}"):
        LLM(folder, device="cpu", dtype="float32")
    (record,) = host.list_quarantined()
    assert record.stage == "format" and record.distribution.startswith("acme_format_")


def test_two_plugins_for_one_method(checkpoint, with_plugins):
    """Neither reads it until the user chooses one."""
    host = with_plugins(registering("rows"), registering("WeightFormat(rows)"))
    folder, _ = checkpoint("acme-rows", int8_rows)
    with pytest.raises(PluginError, match=r"'acme-rows' is claimed by acme_format_.*acme_format_") as caught:
        LLM(folder, device="cpu")
    assert "INFERPLANE_PLUGINS=acme-rows@DISTRIBUTION" in caught.value.remedy
    assert [record.stage for record in host.list_quarantined()] == ["claim", "claim"]
    names = [record.distribution for record in host.list_quarantined()]
    choice = f"only,inferplane_cpu.plugin,{','.join(names)},acme-rows@{names[1]}"
    chosen = plugins.discover(choice)
    assert list(chosen.quantization()) == ["acme-rows"]


def test_random_weights_need_no_reader(with_plugins):
    with_plugins(registering("WeightFormat(rows, kernels_format='int8_row')"), registering("rows", "acme-own"))
    for method in ("acme-rows", "acme-own"):
        config = {
            **llama_config().to_dict(),
            "architectures": ["LlamaForCausalLM"],
            "quantization_config": {"quant_method": method},
        }
        with LLM(config, device="cpu", load_format="dummy", kv_cache_bytes=1 << 20) as llm:
            formats = {w.format for _, w in llm.runner.model.weights()}
        assert formats == ({PLAIN, "int8_row"} if method == "acme-rows" else {PLAIN})


def test_the_example_needs_no_other_name():
    """The page's plugin imports promised names alone."""
    assert set(re.findall(r"^from (\S+) import", EXAMPLE, re.M)) == {"inferplane.plugin"}


def test_the_calibration_method_of_the_page(tmp_path):
    """It is registered, and rounds to nearest."""
    registered = {}
    scope: dict = {}
    exec(METHOD, scope)
    scope["inferplane_register_calibration"](registered.__setitem__)
    method = load_methods(registered)["half"]
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    q = method.run(WeightToRound(weight, Inputs(128, None), "int8_row", None))
    assert (method.kind, q.shape) == ("round", (8, 128)) and (q.dequantize() - weight).abs().max() < 0.02
