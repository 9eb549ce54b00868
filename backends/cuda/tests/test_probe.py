"""How NVIDIA GPUs are recognised, on machines made of files and patched torch builds. No GPU is needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from inferplane.ops import RMSNorm, placeholder
from inferplane.plugin import Backend, Context, DeviceError, KVRequest, Presence
from inferplane_cuda import backend, plugin
from inferplane_cuda.backend import CudaBackend, arch_name, features_of
from inferplane_cuda.kernels import providers

VENDORS = ("torch_npu", "torch_gcu", "torch_xmlir", "triton", "flashinfer", "flash_attn", "flash_mla", "deep_gemm")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for /dev and /proc of a machine with a CUDA build of torch and nothing else."""
    monkeypatch.setattr(backend, "DRIVER_FILE", str(tmp_path / "version"))
    monkeypatch.setattr(backend, "DEVICE_NODES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(backend, "OTHER_NODES", (str(tmp_path / "dxg"),))
    monkeypatch.setattr(backend, "is_installed", lambda module: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(backend.VISIBLE_DEVICES, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def gpus(machine, monkeypatch):
    """The same with a driver and two H200s that CUDA can use."""
    (machine / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n")
    for index in range(2):
        (machine / f"nvidia{index}").touch()
    (machine / "nvidiactl").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 140))
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(CudaBackend, "touch", lambda self: current.append(self.torch_device_indexed))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: current.append("synchronize"))
    return current


def test_registers_what_it_can_import():
    registered = {}
    plugin.inferplane_register_backends(registered.__setitem__)
    assert list(registered) == ["cuda"]
    module, _, attribute = registered["cuda"].partition(":")
    found = getattr(import_module(module), attribute)
    assert issubclass(found, Backend)
    assert found.name == "cuda"
    assert plugin.INFERPLANE_API == (1, 1)


def test_this_machine_is_explained():
    probe = CudaBackend.probe()
    assert probe.reason
    assert probe.available or probe.remedy
    assert probe.versions["torch"] == torch.__version__
    if not probe.available:
        with pytest.raises(DeviceError) as caught:
            CudaBackend().open()
        assert caught.value.remedy == probe.remedy


def test_build_without_cuda(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch 2.13.0 is a build without CUDA" in probe.reason
    assert "no NVIDIA driver is visible" in probe.reason
    assert "CUDA build of torch" in probe.remedy
    assert "driver" in probe.remedy


def test_build_without_cuda_beside_a_driver_asks_only_for_torch(gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "an NVIDIA driver is there" in probe.reason
    assert "driver" not in probe.remedy


def test_no_driver(machine):
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "no NVIDIA driver is visible" in probe.reason
    assert backend.DRIVER_FILE in probe.reason
    assert "--gpus all" in probe.remedy


def test_the_tool_alone_is_no_driver(machine):
    tool = machine / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "nvidia-smi is on PATH" in probe.reason


def test_available(gpus):
    probe = CudaBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions == {"torch": "2.13.0", "cuda": "12.6", "driver": "580.65.06"}
    assert probe.devices == 2
    assert not probe.remedy


@pytest.mark.parametrize("node", ["dxg", "nvidia0"])
def test_a_node_is_a_driver_of_unknown_version(machine, node):
    (machine / node).touch()
    probe = CudaBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions["driver"] == "unknown"


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus(gpus, monkeypatch, value):
    monkeypatch.setenv(backend.VISIBLE_DEVICES, value)
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in probe.reason
    assert "unset CUDA_VISIBLE_DEVICES" in probe.remedy


def test_chosen_gpus_are_counted_by_cuda_alone(gpus, monkeypatch):
    monkeypatch.setenv(backend.VISIBLE_DEVICES, "1")
    probe = CudaBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.devices is None


def test_hip_build_is_not_nvidia(gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.3.26093")
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "HIP 6.3.26093" in probe.reason
    assert "device='dcu'" in probe.remedy


def test_kunlun_masquerade_is_left_to_kunlun(gpus, monkeypatch):
    monkeypatch.setattr(backend, "is_installed", lambda module: module == "torch_xmlir")
    probe = CudaBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "Kunlun" in probe.reason
    assert "device='xpu:kunlun'" in probe.remedy


def test_probe_is_cheap():
    def once() -> float:
        start = time.perf_counter()
        CudaBackend.probe()
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.1


def test_open_describes_the_gpu(gpus):
    state = CudaBackend(1).open()
    assert state.torch_device == "cuda:1"
    assert state.name == "NVIDIA H200"
    assert state.arch == "sm90a"
    assert state.features["fp8"].present
    assert (state.memory.total_bytes, state.memory.free_bytes) == (140, 100)
    assert gpus == [1, "cuda:1", "synchronize"], "current device set, one allocation, waited for"


def test_open_without_a_driver_gives_the_probes_reason(machine):
    with pytest.raises(DeviceError, match="no NVIDIA driver is visible") as caught:
        CudaBackend().open()
    assert caught.value.remedy == CudaBackend.probe().remedy


def test_open_of_an_index_too_far(gpus, monkeypatch):
    monkeypatch.setenv(backend.VISIBLE_DEVICES, "0,1")
    with pytest.raises(DeviceError, match="cuda:2 was requested") as caught:
        CudaBackend(2).open()
    assert "CUDA_VISIBLE_DEVICES=0,1" in caught.value.there_is
    assert "below 2" in caught.value.remedy


def test_open_when_cuda_does_not_start(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError) as caught:
        CudaBackend().open()
    assert "0 GPUs" in caught.value.there_is
    assert "nvidia-smi" in caught.value.remedy


def test_open_of_another_vendors_gpu(gpus, machine, monkeypatch):
    (machine / "version").unlink()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Iluvatar BI-V150")
    with pytest.raises(DeviceError, match="'Iluvatar BI-V150', which is not an NVIDIA GPU"):
        CudaBackend().open()


def test_open_when_the_allocation_fails(gpus, monkeypatch):
    def fail(self):
        raise RuntimeError("CUDA error: out of memory\n  at line 1")

    monkeypatch.setattr(CudaBackend, "touch", fail)
    with pytest.raises(DeviceError, match="RuntimeError: CUDA error: out of memory at line 1") as caught:
        CudaBackend().open()
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("capability", "arch", "has", "lacks"),
    [
        ((7, 5), "sm75", {"fp16", "int8-dot"}, {"bf16", "fp8", "sm80", "sm90a"}),
        ((8, 0), "sm80", {"bf16", "sm80"}, {"fp8", "sm89", "sm90a"}),
        ((8, 9), "sm89", {"bf16", "fp8", "sm80", "sm89"}, {"sm90", "sm90a"}),
        ((9, 0), "sm90a", {"bf16", "fp8", "sm90", "sm90a"}, {"fp4", "sm100", "sm100a"}),
        ((10, 0), "sm100", {"fp4", "sm90", "sm100a"}, {"sm90a", "sm120"}),
        ((10, 3), "sm103", {"fp4", "sm100"}, {"sm90a", "sm100a"}),
        ((12, 0), "sm120", {"fp4", "sm100", "sm120", "sm120a"}, {"sm90a", "sm100a"}),
    ],
)
def test_features_of_a_compute_capability(capability, arch, has, lacks):
    features = features_of(capability)
    assert arch_name(capability) == arch
    assert {name for name in has | lacks if features[name].present} == has
    assert all("this is compute capability {}.{}".format(*capability) in features[name].reason for name in features)
    told = {**features, **providers.features()}
    assert dict(CudaBackend().features(arch)) == told, "explain --arch and open() agree"


def test_assumed_architectures():
    assert next(iter(CudaBackend.architectures)) == "sm90a"
    assert set(CudaBackend.architectures) == {"sm90a", "sm80", "sm89", "sm100", "sm120"}
    for arch, names in CudaBackend.architectures.items():
        assert set(names) == {name for name, feature in CudaBackend().features(arch).items() if feature.present}
    assert dict(CudaBackend().features()) == dict(CudaBackend().features("sm90a"))
    assert not CudaBackend().features("gfx936"), "another vendor's architecture is unknown in everything"


def test_blocks_of_64_tokens_for_every_kind_of_layer():
    for request in (KVRequest("gqa", 8, 128, 128), KVRequest("mla", 1, 576)):
        layouts = CudaBackend().kv_layouts(request, torch.bfloat16)
        assert {layout.block_tokens for layout in layouts} == {64}
        assert [layout.kv_dtype for layout in layouts[:3]] == ["auto", "fp8", "int8"]
        assert [layout.name for layout in layouts[3:]] == (["latent_64_fp8"] if request.kind == "mla" else [])


def test_every_declared_kernel_exists():
    """Functions behind dotted names are looked for in the source: importing them takes what only a GPU machine has."""
    kernels = CudaBackend().kernels()
    assert {kernel.provider for kernel in kernels} >= {"torch", "triton"}
    for kernel in kernels:
        if not isinstance(kernel.target, str):
            assert callable(kernel.target)
            continue
        module, _, name = kernel.target.partition(":")
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None, module
        defined = {node.name for node in ast.parse(Path(spec.origin).read_text()).body if hasattr(node, "name")}
        assert name in defined, kernel.target


def test_without_triton_its_kernels_say_so(gpus, monkeypatch):
    op = RMSNorm(placeholder(64), 1e-6)
    kernel = next(k for k in CudaBackend().kernels() if (k.op, k.provider) == ("rms_norm", "triton"))
    monkeypatch.setattr(backend, "is_installed", lambda module: module == "triton")
    ctx = Context(torch.bfloat16, "decode", features=CudaBackend().open().features)
    assert kernel.refusals(op, ctx, op.formats()) == []
    monkeypatch.setattr(backend, "is_installed", lambda module: False)
    ctx = Context(torch.bfloat16, "decode", features=CudaBackend().open().features)
    assert kernel.refusals(op, ctx, op.formats()) == [
        "feature 'triton' is absent: Triton is not installed (pip install triton)"
    ]


def test_collectives():
    assert CudaBackend().comm() == "nccl"


def test_nothing_of_a_vendor_is_imported_and_no_device_started(tmp_path):
    """Each vendor's package is there, and fails when imported."""
    for vendor in VENDORS:
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "__init__.py").write_text(f"raise SystemExit('{vendor} was imported')")
    code = f"""
import sys
import inferplane_cuda.plugin
assert "inferplane_cuda.backend" not in sys.modules, "the plugin imports its backend"
import torch
from inferplane_cuda.backend import CudaBackend
from inferplane.plugin import KVRequest
backend = CudaBackend()
CudaBackend.probe(), backend.kernels(), backend.features(), backend.comm()
backend.kv_layouts(KVRequest("mla", 1, 576), torch.bfloat16)
assert not set({VENDORS!r}) & set(sys.modules), "a vendor's package was imported"
assert not torch.cuda.is_initialized()
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
