"""Where the vendor's functions are looked for: modules of several releases, made here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.binding import PlanSettings, bind
from inferplane.conformance.configs import SLICES, model
from inferplane.plugin import KernelError
from inferplane_dcu import vendor, versions
from inferplane_dcu.backend import DcuBackend
from inferplane_dcu.chips import features_here, features_of

PACKAGES = ("lightop", "lmslim", "flash_attn", "flash_mla")


@pytest.fixture
def installed(monkeypatch):
    """A function that installs modules with functions; nothing of the vendor's is there otherwise."""
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)

    def install(path, *names):
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            here = ".".join(parts[:i])
            if here not in sys.modules:
                monkeypatch.setitem(sys.modules, here, ModuleType(here))
        for name in names:
            function = lambda *args: args  # noqa: E731
            function.__module__ = path
            setattr(sys.modules[path], name, function)

    return install


def test_the_newest_module_wins(installed):
    installed("lightop.op", "rmsnorm_forward_autograd")
    assert vendor.RMS_NORM.find().__module__ == "lightop.op"
    installed("lightop.norm", "rmsnorm_forward_autograd")
    assert vendor.RMS_NORM.find().__module__ == "lightop.norm"


def test_a_module_without_the_function_is_passed_by(installed):
    installed("lightop.gemm_ops", "another")
    installed("lmslim.quant_ops", "hipblaslt_w8a8_gemm")
    assert vendor.W8A8.find().__module__ == "lmslim.quant_ops"


def test_lmslim_serves_before_its_functions_moved(installed):
    installed("lmslim.layers.gemm.int8_utils", "per_token_quant_int8")
    quantize = vendor.find_once(vendor.QUANTIZE)(None, None)
    assert quantize.__module__ == "lmslim.layers.gemm.int8_utils"


def test_a_missing_library_is_reported(installed):
    installed("lightop.op", "another")
    with pytest.raises(KernelError, match="silu_and_mul_opt of Hygon's lightop is not here") as caught:
        vendor.find_once(vendor.SILU_MUL, vendor.RMS_NORM)(None, None)
    assert "lightop.activation: ModuleNotFoundError" in caught.value.there_is
    assert "lightop.op: AttributeError" in caught.value.there_is


def test_a_wheel_that_breaks_when_imported_is_a_feature_that_is_absent(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "lightop":
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "lightop").mkdir()
    (tmp_path / "lightop/__init__.py").write_text("raise ValueError('unknown DTK\\nat line 3')")
    monkeypatch.syspath_prepend(str(tmp_path))
    feature = features_here("gfx936")["lightop.silu_and_mul_opt"]
    assert feature.present is False and "ValueError: unknown DTK at line 3" in feature.reason


def test_lightops_tables_go_by_the_current_dcu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"BW1000 {i}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(multi_processor_count=80))
    assert vendor.device() == ("BW1000 1", 80)


def test_features_of_a_machine(installed, monkeypatch):
    monkeypatch.setattr(versions, "read_installed", dict)
    none = features_here("gfx936")
    assert not any(none[f.feature].present for f in vendor.FUNCTIONS)
    assert none["lightop.silu_and_mul_opt"].reason.startswith("lightop: not installed")
    assert none["hcu-ops"].present is False and none["triton"].present is False
    installed("lightop.op", "silu_and_mul_opt")
    some = features_here("gfx936")
    assert [name for name in some if some[name].present and "." in name] == ["lightop.silu_and_mul_opt"]
    assert some["lightop.silu_and_mul_opt"].reason == "found in lightop.op"
    assert "lightop.norm: ModuleNotFoundError" in some["lightop.fused_add_rms_norm"].reason


@pytest.mark.parametrize(
    ("packages", "present"),
    [
        ({"triton": "3.3.0+das.opt1.dtk2604.torch290"}, True),
        ({"flagtree": "0.5.1+hcu3.1"}, True),
        ({"triton": "3.9.0"}, False),
        ({}, False),
    ],
)
def test_only_hygons_triton_counts(monkeypatch, packages, present):
    monkeypatch.setattr(vendor, "is_installed", lambda name: True)
    monkeypatch.setattr(versions, "read_installed", lambda: packages)
    feature = vendor.triton("gfx936")
    assert feature.present is present
    assert present or "which alone knows gfx936" in feature.reason


def test_operators_that_do_not_load_are_reported(tmp_path, monkeypatch):
    (tmp_path / "vllm_hcu").mkdir()
    (tmp_path / "vllm_hcu/__init__.py").write_text("raise SystemExit('vLLM was imported')")
    (tmp_path / "vllm_hcu/hcu_ops.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    feature = vendor.find_features()["hcu-ops"]
    assert feature.present is False and "hcu_ops.so does not load" in feature.reason


def layouts_and_kernels(features):
    """Of Llama's layers in bfloat16: the KV layout, and what serves attention and the cache's write."""
    backend = DcuBackend()
    settings = PlanSettings("dcu", torch.bfloat16, "gfx936", features, assumed=True)
    plan = bind(
        model(SLICES["llama_8b_two_layers"]),
        backend.kernels(),
        settings,
        lambda r: [x for x in backend.kv_layouts(r, torch.bfloat16) if x.kv_dtype == "auto"],
    )
    served = {
        (kind, op.name, getattr(op, "queries", "")): choice.kernel.name
        for kind in plan.choices
        for _, op, choice in plan.sites(kind)
        if choice.kernel is not None and op.name in ("attention", "kv_write", "norm_rope_write")
    }
    return {layout.name for layout in plan.layouts.values()}, served


def test_the_layout_follows_what_is_here():
    """Blocks of heads where the vendor's attention serves both ranges; plain ones where its other, or Triton, must."""
    everything = features_of("gfx936")
    names, served = layouts_and_kernels(everything)
    assert names == {"dcu_heads_64"}
    assert served["decode", "attention", "few"] == "flash_attn:attention_tokens"
    assert served["mixed", "attention", "many"] == "flash_attn:attention_prompts"
    names, served = layouts_and_kernels(features_of("gfx928"))
    assert names == {"paged_64"}, "its attention for prompts is wrong there"
    assert served["mixed", "attention", "many"] == "flash_attn:attention_paged"
    assert served["decode", "kv_write", ""] == "hcu_ops:kv_write"
    bare = {name: f for name, f in everything.items() if "." not in name and name != "hcu-ops"}
    names, served = layouts_and_kernels(type(everything)(bare))
    assert names == {"paged_64"}
    assert set(served.values()) == {"triton:attention", "triton:norm_rope_write"}
