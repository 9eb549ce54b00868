"""How Enflame GCUs are recognised, on machines made of files and a stand-in for torch_gcu. No GCU is needed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.plugin import Backend, DeviceError, KVRequest, Presence
from inferplane_gcu import backend, plugin
from inferplane_gcu.backend import GcuBackend, features_of, generation_of

REAL_RUNTIME = GcuBackend.runtime
VENDORS = ("torch_gcu", "torch_npu", "torch_xmlir", "triton", "tops_extension", "flash_attn", "xformers", "vllm_gcu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for the root of a machine with torch 2.10 and nothing of Enflame's."""
    for name in ("dev", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(backend, "DEVICE_NODES", str(tmp_path / "dev/gcu[0-9]*"))
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    monkeypatch.delenv(backend.VISIBLE, raising=False)
    for vendor in VENDORS:
        monkeypatch.delitem(sys.modules, vendor, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def install(machine, version="2.10.0+3.8.0.2"):
    """torch_gcu as TopsRider leaves it; importing it fails, as it does without the driver."""
    (machine / "site/torch_gcu").mkdir()
    (machine / "site/torch_gcu/__init__.py").write_text("raise ImportError('libtopsrt.so: cannot open shared object')")
    info = machine / f"site/torch_gcu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_gcu\nVersion: {version}\n")


@pytest.fixture
def gcus(machine, monkeypatch):
    """The same with torch_gcu and two S60s; returns the stand-in, which notes calls."""
    install(machine)
    for name in ("gcu0", "gcu1", "gcuctl"):
        (machine / "dev" / name).touch()
    done = []
    gcu = SimpleNamespace(
        done=done,
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: "Enflame S60",
        get_device_capability=lambda index: (3, 0),
        mem_get_info=lambda index: (40, 48),
        set_device=done.append,
        synchronize=lambda index: done.append("synchronize"),
    )
    monkeypatch.setattr(GcuBackend, "runtime", lambda self: gcu)
    monkeypatch.setattr(GcuBackend, "touch", lambda self: done.append(self.torch_device_indexed))
    return gcu


def test_registers_what_it_can_import():
    registered = {}
    plugin.inferplane_register_backends(registered.__setitem__)
    assert list(registered) == ["gcu"]
    module, _, attribute = registered["gcu"].partition(":")
    found = getattr(import_module(module), attribute)
    assert issubclass(found, Backend)
    assert found.name == "gcu"
    assert plugin.INFERPLANE_API == (1, 0)


def test_this_machine_is_explained():
    probe = GcuBackend.probe()
    assert probe.reason
    assert probe.available or probe.remedy
    assert probe.versions["torch"] == torch.__version__
    if not probe.available:
        with pytest.raises(DeviceError) as caught:
            GcuBackend().open()
        assert caught.value.remedy == probe.remedy


def test_nothing_installed(machine, monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda module: False)
    probe = GcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch_gcu is not installed, and no GCU is visible" in probe.reason
    assert "TopsRider" in probe.remedy
    (machine / "dev/gcu0").touch()
    assert "a GCU is there" in GcuBackend.probe().reason


def test_versions_that_differ_are_broken_with_both_ways_out(gcus, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    probe = GcuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert probe.reason == "torch-gcu 2.10.0+3.8.0.2 is made for torch 2.10, this is torch 2.13.0"
    assert "torch_gcu 2.13" in probe.remedy
    assert "'torch==2.10.*'" in probe.remedy


@pytest.mark.parametrize(("version", "torch_version"), [("2.13rc1", "2.13.0"), ("2.13.0+3.8", "2.13.0a0+git1")])
def test_versions_of_one_minor_fit(gcus, monkeypatch, version, torch_version):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(backend, "version_of", lambda distribution: version)
    assert GcuBackend.probe().presence is Presence.AVAILABLE


@pytest.mark.parametrize("version", [None, "of today"])
def test_a_version_that_nobody_can_read_is_broken(gcus, monkeypatch, version):
    monkeypatch.setattr(backend, "version_of", lambda distribution: version)
    probe = GcuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "nothing says which torch" in probe.reason
    assert "torch_gcu 2.10" in probe.remedy


def test_no_device_nodes(gcus, machine):
    for name in ("gcu0", "gcu1"):
        (machine / "dev" / name).unlink()
    probe = GcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "no GCU is" in probe.reason
    assert "/dev/gcuctl" in probe.remedy


def test_available(gcus):
    probe = GcuBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions == {"torch": "2.10.0+cpu", "torch-gcu": "2.10.0+3.8.0.2"}
    assert probe.devices == 2
    assert not probe.remedy
    assert "torch_gcu" not in sys.modules


def test_chosen_gcus_are_counted_by_the_runtime_alone(gcus, monkeypatch):
    monkeypatch.setenv(backend.VISIBLE, "1")
    assert GcuBackend.probe().devices is None


def test_probe_is_cheap():
    def once() -> float:
        start = time.perf_counter()
        GcuBackend.probe()
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.1


def test_open_describes_the_gcu(gcus):
    state = GcuBackend(1).open()
    assert state.torch_device == "gcu:1"
    assert state.name == "Enflame S60"
    assert state.arch == "s60"
    assert state.features["bf16"].present
    assert state.features["fp8"].present is False
    assert (state.memory.total_bytes, state.memory.free_bytes) == (48, 40)
    assert gcus.done == [1, "gcu:1", "synchronize"], "current device set, one allocation, waited for"


@pytest.mark.parametrize("capability", [(4, 0), (14, 0)])
def test_open_of_a_later_generation(gcus, capability):
    gcus.get_device_capability = lambda index: capability
    state = GcuBackend().open()
    assert state.arch == "gcu400"
    assert state.features["fp8"].present
    assert state.features["int64-kernels"].present is None


def test_open_when_the_import_fails(gcus, monkeypatch):
    monkeypatch.setattr(GcuBackend, "runtime", REAL_RUNTIME)
    with pytest.raises(DeviceError, match=r"ImportError: libtopsrt\.so") as caught:
        GcuBackend().open()
    assert "efsmi" in caught.value.remedy


def test_open_when_the_allocation_fails(gcus, monkeypatch):
    def fail(self):
        raise RuntimeError("topsErrorNoDevice\n  at line 1")

    monkeypatch.setattr(GcuBackend, "touch", fail)
    with pytest.raises(DeviceError, match="RuntimeError: topsErrorNoDevice at line 1"):
        GcuBackend().open()


def test_open_of_an_index_too_far(gcus, monkeypatch):
    monkeypatch.setenv(backend.VISIBLE, "0,1")
    with pytest.raises(DeviceError, match="gcu:2 was asked for") as caught:
        GcuBackend(2).open()
    assert "TOPS_VISIBLE_DEVICES=0,1" in caught.value.there_is


def test_open_without_the_package_gives_the_probes_reason(machine, monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda module: False)
    with pytest.raises(DeviceError, match="torch_gcu is not installed") as caught:
        GcuBackend().open()
    assert caught.value.remedy == GcuBackend.probe().remedy


def test_open_beside_another_privateuse1_package(gcus, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(DeviceError, match="'torch_npu' has taken it") as caught:
        GcuBackend().open()
    assert "another process" in caught.value.remedy
    assert not gcus.done


def test_open_beside_an_unknown_privateuse1_package(gcus, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "openreg")
    with pytest.raises(DeviceError, match="'openreg' has taken it"):
        GcuBackend().open()


@pytest.mark.parametrize(("capability", "generation"), [((3, 0), 3), ((13, 0), 3), ((4, 0), 4), ((14, 0), 4)])
def test_both_ways_of_counting_generations(capability, generation):
    assert generation_of(capability) == generation


def test_assumed_architectures():
    assert GcuBackend.architectures == {"s60": ("fp16", "bf16", "int8-dot", "vllm-gcu", "flash-attn")}
    features = GcuBackend().features()
    assert dict(features) == dict(features_of(3)) == dict(GcuBackend().features("s60"))
    assert features["int64-kernels"].present is False
    assert not GcuBackend().features("sm90a"), "another vendor's architecture is unknown in everything"


def test_blocks_of_64_tokens_for_every_kind_of_layer():
    for request in (KVRequest("gqa", 8, 128, 128), KVRequest("mla", 1, 576)):
        layouts = GcuBackend().kv_layouts(request, torch.bfloat16)
        assert {layout.block_tokens for layout in layouts} == {64}
        assert [layout.kv_dtype for layout in layouts] == ["auto", "int8"]


def test_every_declared_kernel_exists():
    kernels = GcuBackend().kernels()
    assert kernels
    assert all(callable(kernel.function()) for kernel in kernels)


def test_collectives():
    assert GcuBackend().comm() == "eccl"


def test_nothing_of_a_vendor_is_imported(tmp_path):
    """Each vendor's package is there, with metadata, and fails when imported."""
    for vendor in VENDORS:
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "__init__.py").write_text(f"raise SystemExit('{vendor} was imported')")
        info = tmp_path / f"{vendor}-{torch.__version__}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {vendor}\nVersion: {torch.__version__}\n")
    code = f"""
import sys
import inferplane_gcu.plugin
assert "inferplane_gcu.backend" not in sys.modules, "the plugin imports its backend"
import torch
from inferplane_gcu import backend as module
from inferplane.plugin import KVRequest
module.DEVICE_NODES = {str(tmp_path / "torch_gcu")!r}
backend = module.GcuBackend()
assert backend.probe().available, backend.probe()
backend.kernels(), backend.features(), backend.comm(), backend.kv_layouts(KVRequest("mla", 1, 576), torch.bfloat16)
assert not set({VENDORS!r}) & set(sys.modules), "a vendor's package was imported"
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_operators_are_loaded_without_their_package(machine, monkeypatch):
    """Importing the package would rename the device to "cuda"."""
    assert backend.features_here(3)["vllm-gcu"].present is False
    folder = machine / "site/vllm_gcu"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    assert "not installed" in backend.features_here(3)["vllm-gcu"].reason
    library = folder / "_C.cpython-311.so"
    library.write_bytes(b"no library")
    importlib.invalidate_caches()
    broken = backend.features_here(3)["vllm-gcu"]
    assert broken.present is False and "_C.cpython-311.so does not load" in broken.reason
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    found = backend.features_here(3)
    assert found["vllm-gcu"].present and loaded == [str(library)]
    assert found["flash-attn"].present is False and "not installed" in found["flash-attn"].reason
    assert "vllm_gcu" not in sys.modules
