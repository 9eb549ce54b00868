"""What both variants of the family have in common: registration, features, layouts, light imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module

import pytest
import torch

from inferplane.plugin import Backend, DeviceError, KVRequest
from inferplane_xpu import plugin
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun.backend import KunlunBackend

GQA, MLA = KVRequest("gqa", 8, 128, 128), KVRequest("mla", 1, 576)


def test_registers_both_variants():
    registered = {}
    plugin.inferplane_register_backends(registered.__setitem__)
    assert list(registered) == ["xpu:intel", "xpu:kunlun"]
    for name, target in registered.items():
        module, _, attribute = target.partition(":")
        found = getattr(import_module(module), attribute)
        assert issubclass(found, Backend)
        assert found.name == name
    assert IntelBackend.torch_device == "xpu"
    assert KunlunBackend.torch_device == "cuda"
    assert plugin.INFERPLANE_API == (1, 0)


@pytest.mark.parametrize("variant", [IntelBackend, KunlunBackend])
def test_this_machine_is_explained(variant):
    probe = variant.probe()
    assert probe.reason
    assert probe.available or probe.remedy
    assert probe.versions["torch"] == torch.__version__
    if not probe.available:
        with pytest.raises(DeviceError) as caught:
            variant().open()
        assert caught.value.remedy == probe.remedy


@pytest.mark.parametrize("variant", [IntelBackend, KunlunBackend])
def test_probe_is_cheap(variant):
    def once() -> float:
        start = time.perf_counter()
        variant.probe()
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.1


def test_assumed_architectures():
    assert list(IntelBackend.architectures) == ["bmg", "lnl", "pvc", "dg2"]
    libraries = ("kunlun-ops", "xspeedgate-ops", "group-topk")
    assert KunlunBackend.architectures == {"p800": ("fp16", "bf16", "int8-dot", *libraries)}
    assert IntelBackend().features()["bf16"].present
    assert IntelBackend().features("pvc")["fp8"].present is None
    assert KunlunBackend().features()["fp8"].present is False
    assert not KunlunBackend().features("bmg"), "another vendor's architecture is unknown in everything"
    assert "bf16" not in IntelBackend().features("p800")


@pytest.mark.parametrize(
    ("variant", "request_", "tokens"),
    [(IntelBackend, GQA, 64), (IntelBackend, MLA, 64), (KunlunBackend, GQA, 16), (KunlunBackend, MLA, 64)],
)
def test_block_tokens(variant, request_, tokens):
    layouts = variant().kv_layouts(request_, torch.bfloat16)
    assert {layout.block_tokens for layout in layouts} == {tokens}
    assert [layout.kv_dtype for layout in layouts] == ["auto", "int8"]


@pytest.mark.parametrize("variant", [IntelBackend, KunlunBackend])
def test_every_declared_kernel_exists(variant):
    kernels = variant().kernels()
    assert kernels
    assert all(callable(kernel.function()) for kernel in kernels)


def test_collectives():
    assert IntelBackend().comm() == "xccl"
    assert KunlunBackend().comm() == "nccl"


def test_nothing_of_a_vendor_is_imported_and_no_device_started(vendors, tmp_path):
    """Each vendor's package is there, and fails when imported."""
    for vendor in vendors:
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "__init__.py").write_text(f"raise SystemExit('{vendor} was imported')")
    code = f"""
import sys
import inferplane_xpu.plugin
early = [m for m in sys.modules if m.startswith("inferplane_xpu.") and m.endswith(".backend")]
assert not early, "the plugin imports its backends"
import torch
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun.backend import KunlunBackend
from inferplane.plugin import KVRequest
for variant in IntelBackend, KunlunBackend:
    backend = variant()
    variant.probe(), backend.kernels(), backend.features(), backend.comm()
    backend.kv_layouts(KVRequest("mla", 1, 576), torch.bfloat16)
assert not set({vendors!r}) & set(sys.modules), "a vendor's package was imported"
assert not torch.cuda.is_initialized()
assert not torch.xpu.is_initialized()
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
