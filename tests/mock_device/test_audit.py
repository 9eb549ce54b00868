"""Models on the mock are audited against the cpu device, whatever the mock overrides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferplane import LLM
from inferplane.audit import audit_sites, find_part_pins
from inferplane.binding.link import bind_body
from inferplane.calibrate.texts import Window
from inferplane.ops import Op
from inferplane.plugin import Kernel, Weight, When
from tests.e2e.tiny_models import make, prompts
from tests.mock_device import kernels, mock_device

pytestmark = pytest.mark.filterwarnings("ignore:.*run on their slow reference")

OPTIONS = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": 64, "max_num_batched_tokens": 64}
FUSED = {
    "mock:norm": {},
    "mock:block": {"mock:{kind}_block": [f"layers.{i}.attn" for i in (0, 1)]},
    "mock:layer": {"mock:decoder_layer": ["layers.0", "layers.1"]},
}


def audit(folder, device, **options):
    with LLM(folder, device=device, **OPTIONS, **options) as model, LLM(folder, device="cpu", **OPTIONS) as reference:
        windows = [Window("a", ids) for ids in prompts(model.engine.vocab, (61, 40))]
        return audit_sites(model, reference, windows)


@pytest.mark.parametrize("device", FUSED)
@pytest.mark.parametrize(("kind", "family", "case"), [("gqa", "llama", "gqa"), ("mla", "deepseek", "q_lora")])
def test_no_site_diverges(kind, family, case, device, tmp_path, mock):
    make(family, case, tmp_path)
    found = audit(tmp_path, device)
    assert found.first is None, found.first
    assert any(each.introduced for each in found.sites) and found.units[-1].out < 1e-5
    fused = {name.format(kind=kind): sites for name, sites in FUSED[device].items()}
    assert {kernel: sites[:2] for kernel, sites in found.fused["model"].items()} == fused
    inner = {each.site for each in found.sites if each.site.startswith("layers.0.")}
    assert ("layers.0.mlp.down" in inner) == (device != "mock:layer")
    assert ("layers.0.attn.o" in inner) == (device == "mock:norm")


def test_pins_divide_a_layer(tmp_path, mock):
    make("llama", "gqa", tmp_path)
    with LLM(tmp_path, device="cpu", **OPTIONS) as plain:
        pins = find_part_pins(plain.runner.model, {})
    found = audit(tmp_path, "mock:layer", ops=pins)
    assert found.first is None and not found.fused["model"]
    assert {"layers.0.attn.o", "layers.1.mlp.down"} <= {each.site for each in found.sites}


def test_a_kernel_that_is_wrong_for_long_prompts_is_named(tmp_path, monkeypatch, mock):
    """The canary's samples are too short to see it."""

    def faulty(p, x, batch, kv):
        y = kernels.gqa_block(p, x, batch, kv)
        return y * 1.1 if x.shape[0] > 50 else y

    declared = [
        replace(kernel, target=faulty) if kernel.op == "gqa_block" else kernel for kernel in mock_device.Block.declared
    ]
    monkeypatch.setattr(mock_device.Block, "declared", declared)
    make("llama", "gqa", tmp_path)
    found = audit(tmp_path, "mock:block")
    assert (found.first.site, found.first.kernel) == ("layers.0.attn", "mock:faulty")
    assert found.first.reference_kernel == "decomposition" and found.first.arrived < 1e-6
    assert 0.05 < found.first.introduced < 0.1, "0.1 in the window of 61 tokens, none in that of 40"
    assert [each.site for each in found.sites if each.role == "introduces"] == ["layers.0.attn", "layers.1.attn"]


def values_of(op, view):
    """The values of all weights of an op, by their ids, from its view."""
    for path, value in op.items():
        held = view[int(path)] if path.isdigit() else getattr(view, path)
        if isinstance(value, Weight):
            yield id(value), held
        elif isinstance(value, Op):
            yield from values_of(value, held)


def all_layers(view, x, residual, batch, cache):
    """All layers in one call, by their bodies."""
    values = dict(values_of(view.prepared, view))
    return bind_body(view.prepared, lambda weight: values[id(weight)])(x, residual, batch, cache)


def by_body(view, x, residual, batch, cache):
    return view.body(x, residual, batch, cache)


@pytest.mark.filterwarnings("ignore:.*could not be checked")
@pytest.mark.parametrize("inlines", [False, True])
def test_kernels_of_all_layers(inlines, tmp_path, monkeypatch, mock):
    """One that runs all layers in its own call is a unit; one that inlines their kernels runs as its body."""
    when = When(needs=(("an MLP of 112", lambda op: op.layers[0].mlp.down.weight.shape[1] == 112),))  # as no sample has
    if inlines:
        kernel = Kernel("decoder_stack", "mock", by_body, when, 95, inlines={"*": ("mock:decoder_layer",)})
    else:
        kernel = Kernel("decoder_stack", "mock", all_layers, when, 95, prepare=lambda op, ctx: op)
    monkeypatch.setattr(mock_device.Layer, "declared", [*mock_device.Layer.declared, kernel])
    make("llama", "gqa", tmp_path)
    found = audit(tmp_path, "mock:layer")
    layers = ["layers.0", "layers.1"] if inlines else ["layers"]
    assert [each.site for each in found.units] == ["embed", *layers, "norm", "head"]
    assert found.first is None, found.first
    assert found.units[1].kernel == ("mock:decoder_layer" if inlines else "mock:all_layers")
    assert found.units[1].introduced > 0
