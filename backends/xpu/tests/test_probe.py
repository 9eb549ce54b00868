"""How Intel GPUs and Kunlun cards are recognised, on machines made of files and patched torch builds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.plugin import Backend, DeviceError, KVRequest, Presence
from inferplane_xpu import intel, kunlun, plugin
from inferplane_xpu.backend import IntelBackend, KunlunBackend

VENDORS = ("torch_xmlir", "torch_npu", "torch_gcu", "triton", "intel_extension_for_pytorch", "kunlun_ops", "cocopod")
GQA, MLA = KVRequest("gqa", 8, 128, 128), KVRequest("mla", 1, 576)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for the root of a machine with a plain build of torch and nothing else."""
    for name in ("dev", "sys", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(intel, "RENDER_NODES", str(tmp_path / "dev/renderD*"))
    monkeypatch.setattr(intel, "RENDER_VENDORS", str(tmp_path / "sys/{node}"))
    monkeypatch.setattr(intel, "WSL_NODE", str(tmp_path / "dev/dxg"))
    monkeypatch.setattr(kunlun, "DEVICE_NODES", str(tmp_path / "dev/xpu[0-9]*"))
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: False)
    for variable in (intel.VISIBLE, *kunlun.VISIBLE):
        monkeypatch.delenv(variable, raising=False)
    for vendor in VENDORS:
        monkeypatch.delitem(sys.modules, vendor, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def add_intel_gpus(machine, count=1):
    for index in range(count):
        (machine / f"dev/renderD{128 + index}").touch()
        (machine / f"sys/renderD{128 + index}").write_text("0x8086\n")


def install_torch_xmlir(machine):
    """torch_xmlir as the vendor's image has it; importing it fails, as it does without the driver."""
    (machine / "site/torch_xmlir").mkdir()
    (machine / "site/torch_xmlir/__init__.py").write_text("raise ImportError('libxpurt.so: cannot open shared object')")
    (machine / "site/torch_xmlir-1.0.0.dist-info").mkdir()
    (machine / "site/torch_xmlir-1.0.0.dist-info/METADATA").write_text("Name: torch_xmlir\nVersion: 1.0.0\n")


@pytest.fixture
def intel_gpus(machine, monkeypatch):
    """The same with an XPU build of torch and two Arc B580s; returns what torch reports and what was done."""
    add_intel_gpus(machine, 2)
    properties = SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics",
        total_memory=12,
        has_fp16=True,
        has_bfloat16_conversions=True,
        has_subgroup_matrix_multiply_accumulate=True,
    )
    done = []
    monkeypatch.setattr(torch.version, "xpu", "20250201", raising=False)
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda index: (11, 12), raising=False)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda index: 2)
    monkeypatch.setattr(torch.xpu, "set_device", done.append)
    monkeypatch.setattr(intel, "_touch", done.append)
    return SimpleNamespace(properties=properties, done=done)


@pytest.fixture
def kunlun_cards(machine, monkeypatch):
    """The same with the vendor's torch, torch_xmlir that can be imported, and two P800s; returns what was done."""
    install_torch_xmlir(machine)
    for name in ("xpu0", "xpu1", "xpuctrl"):
        (machine / "dev" / name).touch()
    done = []
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu118")
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "KUNLUN P800")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (90, 96))
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(kunlun, "_touch", done.append)
    monkeypatch.setattr(kunlun, "import_module", lambda name: done.append(name))
    return done


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


# ------------------------------------------------------------------ Intel


def test_intel_build_without_xpu(machine):
    probe = IntelBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch 2.13.0 is a build without XPU, and no Intel GPU is visible" in probe.reason
    assert "https://download.pytorch.org/whl/xpu" in probe.remedy
    assert "Level Zero" in probe.remedy


def test_intel_gpu_without_an_xpu_build_asks_only_for_torch(machine):
    add_intel_gpus(machine)
    probe = IntelBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "an Intel GPU is there" in probe.reason
    assert "https://download.pytorch.org/whl/xpu" in probe.remedy
    assert "Level Zero" not in probe.remedy


def test_intel_build_without_a_gpu(machine, monkeypatch):
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    probe = IntelBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "no Intel GPU" in probe.reason
    assert "Level Zero" in probe.remedy


def test_another_vendors_render_node_is_no_intel_gpu(machine, monkeypatch):
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    (machine / "dev/renderD128").touch()
    (machine / "sys/renderD128").write_text("0x1002\n")
    probe = IntelBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "renderD128 belong to other vendors" in probe.reason


def test_a_render_node_whose_vendor_cannot_be_read_may_be_intels(machine, monkeypatch):
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    (machine / "dev/renderD128").touch()
    assert IntelBackend.probe().presence is Presence.AVAILABLE


def test_intel_available(intel_gpus):
    probe = IntelBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert "renderD128" in probe.reason
    assert probe.versions == {"torch": "2.13.0", "xpu": "20250201"}
    assert not probe.remedy


def test_intel_under_wsl(machine, monkeypatch):
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    (machine / "dev/dxg").touch()
    assert IntelBackend.probe().presence is Presence.AVAILABLE


def test_intel_gives_way_to_kunlun(intel_gpus, kunlun_cards):
    probe = IntelBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch_xmlir is installed" in probe.reason
    assert "device='xpu:kunlun'" in probe.remedy
    assert KunlunBackend.probe().presence is Presence.AVAILABLE


def test_intel_open_describes_the_gpu(intel_gpus):
    state = IntelBackend(1).open()
    assert state.torch_device == "xpu:1"
    assert state.arch == "bmg"
    assert state.features["bf16"].present
    assert state.features["int8-dot"].present
    assert state.features["fp8"].present is None
    assert (state.memory.total_bytes, state.memory.free_bytes) == (12, 11)
    assert intel_gpus.done == [1, "xpu:1"], "current device set, then one allocation on it"


def test_intel_features_are_what_torch_reports(intel_gpus):
    intel_gpus.properties.has_bfloat16_conversions = False
    del intel_gpus.properties.has_subgroup_matrix_multiply_accumulate
    features = IntelBackend().open().features
    assert features["bf16"].present is False
    assert "has_bfloat16_conversions=False" in features["bf16"].reason
    assert features["int8-dot"].present is None, "an older torch does not report it"


def test_intel_memory_where_the_driver_does_not_tell(intel_gpus, monkeypatch):
    def fail(index):
        raise RuntimeError("The device doesn't support querying the available free memory")

    monkeypatch.setattr(torch.xpu, "mem_get_info", fail)
    memory = IntelBackend().memory()
    assert (memory.total_bytes, memory.free_bytes) == (12, 10)


def test_intel_open_of_an_index_too_far(intel_gpus, monkeypatch):
    monkeypatch.setenv(intel.VISIBLE, "0,1")
    with pytest.raises(DeviceError, match="xpu:2 was asked for") as caught:
        IntelBackend(2).open()
    assert "ZE_AFFINITY_MASK=0,1" in caught.value.there_is


def test_intel_open_without_xpu_gives_the_probes_reason(machine):
    with pytest.raises(DeviceError, match="a build without XPU") as caught:
        IntelBackend().open()
    assert caught.value.remedy == IntelBackend.probe().remedy


def test_intel_open_when_the_allocation_fails(intel_gpus, monkeypatch):
    def fail(device):
        raise RuntimeError("UR_RESULT_ERROR_DEVICE_LOST")

    monkeypatch.setattr(intel, "_touch", fail)
    with pytest.raises(DeviceError, match="RuntimeError: UR_RESULT_ERROR_DEVICE_LOST"):
        IntelBackend().open()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Intel(R) Arc(TM) B580 Graphics", "bmg"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "bmg"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("Intel(R) Arc(TM) A770 Graphics", "dg2"),
        ("Intel(R) Data Center GPU Flex 170", "dg2"),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", "xe"),
    ],
)
def test_intel_architecture_of_a_name(name, arch):
    assert intel.arch_of(name) == arch


# ------------------------------------------------------------------ Kunlun


def test_kunlun_nothing_installed(machine, monkeypatch):
    monkeypatch.setattr(kunlun, "_installed", lambda module: False)
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch_xmlir is not installed, and no Kunlun card is visible" in probe.reason
    assert "xpytorch" in probe.remedy
    (machine / "dev/xpu0").touch()
    assert "a Kunlun card is there" in KunlunBackend.probe().reason


def test_kunlun_with_somebody_elses_torch_is_broken(kunlun_cards, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "torch 2.5.1+cu118 is not the vendor's" in probe.reason
    assert "xpytorch" in probe.remedy


def test_kunlun_no_device_nodes(kunlun_cards, machine):
    for name in ("xpu0", "xpu1"):
        (machine / "dev" / name).unlink()
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "no Kunlun card is" in probe.reason
    assert "/dev/xpuctrl" in probe.remedy


def test_kunlun_available(kunlun_cards):
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions == {"torch": "2.5.1+cu118", "torch_xmlir": "1.0.0"}
    assert probe.devices == 2
    assert not probe.remedy
    assert "torch_xmlir" not in sys.modules


@pytest.mark.parametrize("variable", kunlun.VISIBLE)
def test_kunlun_chosen_cards_are_counted_by_the_runtime_alone(kunlun_cards, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert KunlunBackend.probe().devices is None


def test_kunlun_open_describes_the_card(kunlun_cards):
    state = KunlunBackend(1).open()
    assert state.torch_device == "cuda:1"
    assert state.name == "KUNLUN P800"
    assert state.arch == "p800"
    assert state.features["bf16"].present
    assert state.features["fp8"].present is False
    assert (state.memory.total_bytes, state.memory.free_bytes) == (96, 90)
    assert kunlun_cards == ["torch_xmlir", 1, "cuda:1"], "imported, current device set, then one allocation on it"


def test_kunlun_open_when_the_import_fails(kunlun_cards, monkeypatch):
    monkeypatch.setattr(kunlun, "import_module", import_module)
    with pytest.raises(DeviceError, match=r"ImportError: libxpurt\.so") as caught:
        KunlunBackend().open()
    assert "xpu-smi" in caught.value.remedy


def test_kunlun_open_of_an_index_too_far(kunlun_cards):
    with pytest.raises(DeviceError, match="Kunlun card 2 was asked for") as caught:
        KunlunBackend(2).open()
    assert "XPU_VISIBLE_DEVICES=not set" in caught.value.there_is


def test_kunlun_open_without_the_package_gives_the_probes_reason(machine, monkeypatch):
    monkeypatch.setattr(kunlun, "_installed", lambda module: False)
    with pytest.raises(DeviceError, match="torch_xmlir is not installed") as caught:
        KunlunBackend().open()
    assert caught.value.remedy == KunlunBackend.probe().remedy


def test_a_package_imported_by_hand_counts_as_installed(machine, monkeypatch):
    module = ModuleType("torch_xmlir")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch_xmlir", module)
    assert KunlunBackend.probe().presence is Presence.BROKEN
    assert "Kunlun" in IntelBackend.probe().reason


# ------------------------------------------------------------------ both


def test_assumed_architectures():
    assert list(IntelBackend.architectures) == ["bmg", "pvc", "dg2"]
    assert KunlunBackend.architectures == {"p800": ("fp16", "bf16", "int8-dot")}
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


def test_nothing_of_a_vendor_is_imported_and_no_device_started(tmp_path):
    """Each vendor's package is there, and fails when imported."""
    for vendor in VENDORS:
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "__init__.py").write_text(f"raise SystemExit('{vendor} was imported')")
    code = f"""
import sys
import inferplane_xpu.plugin
assert "inferplane_xpu.backend" not in sys.modules, "the plugin imports its backends"
import torch
from inferplane_xpu.backend import IntelBackend, KunlunBackend
from inferplane.plugin import KVRequest
for variant in IntelBackend, KunlunBackend:
    backend = variant()
    variant.probe(), backend.kernels(), backend.features(), backend.comm()
    backend.kv_layouts(KVRequest("mla", 1, 576), torch.bfloat16)
assert not set({VENDORS!r}) & set(sys.modules), "a vendor's package was imported"
assert not torch.cuda.is_initialized()
assert not torch.xpu.is_initialized()
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
