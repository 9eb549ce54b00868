"""How Enflame GCUs are recognised, on machines made of files and a stand-in for torch_gcu. No GCU is needed."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels import probes
from inferplane.plugin import KVRequest, Presence
from inferplane_gcu import backend, plugin
from inferplane_gcu.backend import GcuBackend, features_of, generation_of
from tests.vendors.probes import OutsideDeviceTests, forget_packages, install

REAL_RUNTIME = GcuBackend.runtime


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for the root of a machine with torch 2.10 and nothing of Enflame's."""
    for name in ("dev", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(backend, "DEVICE_NODES", str(tmp_path / "dev/gcu[0-9]*"))
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    monkeypatch.delenv(backend.VISIBLE, raising=False)
    forget_packages(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


@pytest.fixture
def gcus(machine, monkeypatch):
    """The same with torch_gcu and two S60s; returns the stand-in, which notes calls."""
    error = "raise ImportError('libtopsrt.so: cannot open shared object')"
    install(machine / "site", "torch_gcu", "2.10.0+3.8.0.2", code=error)
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


class TestGcu(OutsideDeviceTests):
    backend, plugin, registered = GcuBackend, plugin, ["gcu"]
    package, device, remedies = "torch_gcu", ("a GCU", "GCU"), ["TopsRider"]
    versions = {"torch": "2.10.0+cpu", "torch-gcu": "2.10.0+3.8.0.2"}
    nodes, no_node = ["dev/gcu0", "dev/gcu1"], ("no GCU is", "/dev/gcuctl")
    opened, memory = ("gcu:1", "Enflame S60", "s60"), (48, 40)
    called, variables = "gcu:2", ["TOPS_VISIBLE_DEVICES"]
    look, absent, collectives = "efsmi", "torch_gcu is not installed", "eccl"
    import_error, rival, runtime = r"libtopsrt\.so", "torch_npu", REAL_RUNTIME
    before = "from inferplane_gcu import backend as module; module.DEVICE_NODES = SITE + '/node'"
    after = "assert probe.available, probe"

    @pytest.fixture
    def done(self, gcus):
        return gcus.done


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
    monkeypatch.setattr(probes, "version_of", lambda distribution: version)
    assert GcuBackend.probe().presence is Presence.AVAILABLE


@pytest.mark.parametrize("version", [None, "of today"])
def test_an_unreadable_version_is_broken(gcus, monkeypatch, version):
    monkeypatch.setattr(probes, "version_of", lambda distribution: version)
    probe = GcuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "nothing says which torch" in probe.reason
    assert "torch_gcu 2.10" in probe.remedy


@pytest.mark.parametrize("capability", [(4, 0), (14, 0)])
def test_open_of_a_later_generation(gcus, capability):
    gcus.get_device_capability = lambda index: capability
    state = GcuBackend().open()
    assert state.arch == "gcu400"
    assert state.features["fp8"].present
    assert state.features["int64-kernels"].present is None


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
        assert [layout.kv_dtype for layout in layouts if not layout.has_static_scales] == ["auto", "int8"]
        static = [layout.kv_dtype for layout in layouts if layout.has_static_scales]
        assert static == (["int8"] if request.kind == "gqa" else [])


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
