"""How Ascend NPUs are recognised, on machines made of files and a stand-in for torch_npu. No NPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.binding import Settings, bind, explain
from inferplane.conformance.configs import TINY, model
from inferplane.plugin import Backend, DeviceError, KVRequest, Presence
from inferplane_npu import backend, plugin
from inferplane_npu.backend import NpuBackend, arch_of, features_of

REAL_RUNTIME = NpuBackend.runtime
VENDORS = ("torch_npu", "torch_gcu", "torch_xmlir", "triton", "acl", "torchair", "mindie")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for the root of a machine with torch 2.13 and nothing of Ascend's."""
    for name in ("dev", "site", "lib"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(backend, "DEVICE_NODES", str(tmp_path / "dev/davinci[0-9]*"))
    monkeypatch.setattr(backend, "TOOLKIT_FOLDERS", (str(tmp_path / "Ascend/ascend-toolkit/latest"),))
    monkeypatch.setattr(backend, "LOADER_CACHE", str(tmp_path / "ld.so.cache"))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    for variable in (*backend.TOOLKIT_VARIABLES, backend.VISIBLE, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    for vendor in VENDORS:
        monkeypatch.delitem(sys.modules, vendor, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def install(machine, version="2.13.0.post1"):
    """torch-npu as pip leaves it; importing it fails, as it does without CANN."""
    (machine / "site/torch_npu").mkdir()
    (machine / "site/torch_npu/__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object')")
    info = machine / f"site/torch_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")


@pytest.fixture
def npus(machine, monkeypatch):
    """The same with torch-npu, CANN on the loader's path and two NPUs; returns the stand-in, which notes calls."""
    install(machine)
    (machine / "Ascend/ascend-toolkit/latest").mkdir(parents=True)
    (machine / "lib/libascendcl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{machine / 'lib'}")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (machine / "dev" / name).touch()
    done = []
    npu = SimpleNamespace(
        done=done,
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: "Ascend910B3",
        mem_get_info=lambda index: (60, 64),
        set_device=done.append,
        synchronize=lambda index: done.append("synchronize"),
    )
    monkeypatch.setattr(NpuBackend, "runtime", lambda self: npu)
    monkeypatch.setattr(NpuBackend, "touch", lambda self: done.append(self.torch_device_indexed))
    return npu


def test_registers_what_it_can_import():
    registered = {}
    plugin.inferplane_register_backends(registered.__setitem__)
    assert list(registered) == ["npu"]
    module, _, attribute = registered["npu"].partition(":")
    found = getattr(import_module(module), attribute)
    assert issubclass(found, Backend)
    assert found.name == "npu"
    assert plugin.INFERPLANE_API == (1, 0)


def test_this_machine_is_explained():
    probe = NpuBackend.probe()
    assert probe.reason
    assert probe.available or probe.remedy
    assert probe.versions["torch"] == torch.__version__
    if not probe.available:
        with pytest.raises(DeviceError) as caught:
            NpuBackend().open()
        assert caught.value.remedy == probe.remedy


def test_nothing_installed(machine, monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda module: False)
    probe = NpuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch_npu is not installed, and no NPU is visible" in probe.reason
    assert "pip install 'torch-npu==2.13.*'" in probe.remedy
    assert "CANN" in probe.remedy
    (machine / "dev/davinci0").touch()
    assert "an NPU is there" in NpuBackend.probe().reason


def test_versions_that_differ_are_broken_with_both_ways_out(npus, machine):
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rename(machine / "site/torch_npu-2.10.0.post4.dist-info")
    (machine / "site/torch_npu-2.10.0.post4.dist-info/METADATA").write_text("Name: torch-npu\nVersion: 2.10.0.post4\n")
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert probe.reason == "torch-npu 2.10.0.post4 is made for torch 2.10, this is torch 2.13.0+cpu"
    assert "pip install 'torch-npu==2.13.*'" in probe.remedy
    assert "'torch==2.10.*'" in probe.remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in probe.remedy


@pytest.mark.parametrize("version", ["2.13rc1", "2.13.0rc2"])
def test_a_candidate_for_a_release_fits_the_release(npus, machine, version):
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rename(machine / f"site/torch_npu-{version}.dist-info")
    (machine / f"site/torch_npu-{version}.dist-info/METADATA").write_text(f"Name: torch-npu\nVersion: {version}\n")
    assert NpuBackend.probe().presence is Presence.AVAILABLE


def test_without_cann_it_is_broken_and_the_autoload_trap_is_named(machine):
    install(machine)
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "torch-npu 2.13.0.post1 is installed, but CANN is not" in probe.reason
    assert "ASCEND_HOME_PATH" in probe.reason
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in probe.remedy


@pytest.mark.parametrize("named", [True, False])
def test_cann_whose_environment_is_not_set(machine, monkeypatch, named):
    install(machine)
    toolkit = machine / ("elsewhere/cann" if named else "Ascend/ascend-toolkit/latest")
    toolkit.mkdir(parents=True)
    (toolkit.parent / "set_env.sh").touch()
    if named:
        monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(toolkit))
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert str(toolkit) in probe.reason
    assert f"source {toolkit.parent / 'set_env.sh'}" in probe.remedy


def test_no_device_nodes(npus, machine):
    for name in ("davinci0", "davinci1"):
        (machine / "dev" / name).unlink()
    probe = NpuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "no NPU is" in probe.reason
    assert "/dev/davinci_manager" in probe.remedy


def test_available(npus):
    probe = NpuBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions == {"torch": "2.13.0+cpu", "torch-npu": "2.13.0.post1"}
    assert probe.devices == 2
    assert not probe.remedy
    assert "torch_npu" not in sys.modules


def test_a_cann_that_is_too_old_is_broken_with_both_versions(npus, machine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rename(machine / "site/torch_npu-2.9.0.post3.dist-info")
    (machine / "site/torch_npu-2.9.0.post3.dist-info/METADATA").write_text("Name: torch-npu\nVersion: 2.9.0.post3\n")
    toolkit = machine / "Ascend/ascend-toolkit/latest"
    (toolkit / "x86_64-linux").mkdir()
    info = toolkit / "x86_64-linux/ascend_toolkit_install.info"
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100R001C23\n")
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert probe.reason == "torch-npu 2.9.0.post3 is made for CANN 9.1.0, here is CANN 8.3.RC1"
    assert probe.versions["CANN"] == "8.3.RC1"
    for newer in ("9.1.0", "9.2.RC1", "10.0.0"):
        info.write_text(f"version={newer}\n")
        assert NpuBackend.probe().presence is Presence.AVAILABLE, newer
    for older in ("9.1.RC2", "9.0.0", "8.5"):
        info.write_text(f"version={older}\n")
        assert NpuBackend.probe().presence is Presence.BROKEN, older


def test_cann_known_to_the_loaders_cache(npus, machine, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert NpuBackend.probe().presence is Presence.BROKEN
    (machine / "ld.so.cache").write_bytes(b"\0libascendcl.so\0/usr/local/Ascend/lib64/libascendcl.so\0")
    assert NpuBackend.probe().presence is Presence.AVAILABLE


def test_chosen_npus_are_counted_by_cann_alone(npus, monkeypatch):
    monkeypatch.setenv(backend.VISIBLE, "1")
    assert NpuBackend.probe().devices is None


def test_a_build_without_metadata_is_not_called_mismatched(npus, machine, monkeypatch):
    (machine / "site/torch_npu-2.13.0.post1.dist-info/METADATA").unlink()
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rmdir()
    monkeypatch.setattr(backend, "version_of", lambda distribution: None)
    probe = NpuBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert "version unknown" in probe.reason


def test_probe_is_cheap():
    def once() -> float:
        start = time.perf_counter()
        NpuBackend.probe()
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.1


def test_open_describes_the_npu(npus):
    state = NpuBackend(1).open()
    assert state.torch_device == "npu:1"
    assert state.name == "Ascend910B3"
    assert state.arch == "910b"
    assert state.features["bf16"].present
    assert state.features["fp8"].present is False
    assert (state.memory.total_bytes, state.memory.free_bytes) == (64, 60)
    assert npus.done == [1, "npu:1", "synchronize"], "current device set, one allocation, waited for"


def test_open_when_the_import_fails(npus, monkeypatch):
    monkeypatch.setattr(NpuBackend, "runtime", REAL_RUNTIME)
    with pytest.raises(DeviceError, match=r"ImportError: libhccl\.so") as caught:
        NpuBackend().open()
    assert "npu-smi info" in caught.value.remedy
    assert "COMPATIBILITY.md" in caught.value.remedy


def test_open_when_the_allocation_fails(npus, monkeypatch):
    """Stub libraries answer every question and can do nothing."""

    def fail(self):
        raise RuntimeError("aclrtMalloc failed\n  at line 1")

    monkeypatch.setattr(NpuBackend, "touch", fail)
    with pytest.raises(DeviceError, match="RuntimeError: aclrtMalloc failed at line 1"):
        NpuBackend().open()


def test_open_of_an_index_too_far(npus, monkeypatch):
    monkeypatch.setenv(backend.VISIBLE, "0,1")
    with pytest.raises(DeviceError, match="npu:2 was asked for") as caught:
        NpuBackend(2).open()
    assert "ASCEND_RT_VISIBLE_DEVICES=0,1" in caught.value.there_is


def test_open_on_a_broken_installation_gives_the_probes_reason(machine):
    install(machine)
    with pytest.raises(DeviceError, match="CANN is not") as caught:
        NpuBackend().open()
    assert caught.value.remedy == NpuBackend.probe().remedy


def test_open_beside_another_privateuse1_package(npus, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_gcu", ModuleType("torch_gcu"))
    with pytest.raises(DeviceError, match="'torch_gcu' has taken it") as caught:
        NpuBackend().open()
    assert "another process" in caught.value.remedy
    assert not npus.done


def test_open_beside_an_unknown_privateuse1_package(npus, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "openreg")
    with pytest.raises(DeviceError, match="'openreg' has taken it"):
        NpuBackend().open()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Ascend910B1", "910b"),
        ("Ascend910B4-1", "910b"),
        ("Ascend910_9391", "910_93"),
        ("Ascend910_9589", "950"),
        ("Ascend950PR_9599", "950"),
        ("Ascend310P3", "310p"),
        ("Ascend910ProA", "910proa"),
    ],
)
def test_series_of_a_name(name, arch):
    assert arch_of(name) == arch


def test_assumed_architectures():
    assert list(NpuBackend.architectures) == ["910b", "910_93", "310p", "950"]
    assert [arch for arch, names in NpuBackend.architectures.items() if "fp8" in names] == ["950"]
    assert [arch for arch, names in NpuBackend.architectures.items() if "bf16" not in names] == ["310p"]
    assert "float16" in features_of("310p")["bf16"].reason
    assert features_of("950")["int8-dot"].present is None, "what no source says is unknown"
    assert dict(NpuBackend().features()) == dict(features_of("910b"))
    assert not features_of("910proa"), "a series of another generation is unknown in everything"


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (KVRequest("gqa", 8, 128, 128), ["npu_nd_128", "npu_nz_128", "paged_128_int8"]),
        (KVRequest("gqa", 3, 33, 33), ["npu_nd_128", "paged_128_int8"]),
        (KVRequest("mla", 1, 576), ["npu_latent_nd_128", "npu_latent_nz_128", "paged_128_int8"]),
        (KVRequest("mla", 1, 96), ["paged_128", "paged_128_int8"]),
    ],
    ids=["gqa", "gqa_odd", "mla", "mla_small"],
)
def test_blocks_of_128_tokens_for_every_kind_of_layer(request_, names):
    layouts = NpuBackend().kv_layouts(request_, torch.bfloat16)
    assert [layout.name for layout in layouts] == names
    assert {layout.block_tokens for layout in layouts} == {128}
    assert [layout.kv_dtype for layout in layouts] == ["auto"] * (len(names) - 1) + ["int8"]


@pytest.mark.parametrize(
    ("arch", "layout", "kernel", "refused"),
    [
        ("910b", "npu_nd_128", "torch_npu:attention_ragged", "feature 'nz-cache' is absent"),
        ("310p", "npu_nz_128", "atb:attention_nz", "feature 'fused-infer' is absent"),
    ],
)
def test_the_series_decides_between_nd_and_nz(arch, layout, kernel, refused):
    """Kernels and layouts are chosen together, from the series' features alone, and the losers say why."""
    config = {**TINY["llama"], "head_dim": 128, "hidden_size": 128}
    backend = NpuBackend()
    settings = Settings("npu", torch.float16, arch, backend.features(arch), assumed=True)
    tree = model(config)
    plan = bind(tree, backend.kernels(), settings, lambda r: backend.kv_layouts(r, torch.float16)[:-1])
    assert {found.name for found in plan.layouts.values()} == {layout}
    sites = [s for s in explain(plan)["sites"] if s["op"] == "attention"]
    assert {s["chosen"]["kernel"] for s in sites} == {kernel}
    assert any(refused in r["reason"] for s in sites for r in s["rejected"])


def test_atb_needs_nnal(npus, machine):
    """CANN alone has no libatb.so; what is found on the machine goes before what is assumed of the series."""
    found = NpuBackend().open().features
    assert found["atb"].present is False
    assert "libatb.so of NNAL" in found["atb"].reason
    (machine / "lib/libatb.so").touch()
    assert NpuBackend().open().features["atb"].present


def test_every_declared_kernel_exists():
    kernels = NpuBackend().kernels()
    assert kernels
    assert all(callable(kernel.function()) for kernel in kernels)


def test_collectives():
    assert NpuBackend().comm() == "hccl"


def test_nothing_of_a_vendor_is_imported(tmp_path):
    """Each vendor's package is there, with metadata, and fails when imported."""
    for vendor in VENDORS:
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "__init__.py").write_text(f"raise SystemExit('{vendor} was imported')")
        info = tmp_path / f"{vendor}-{torch.__version__}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {vendor}\nVersion: {torch.__version__}\n")
    (tmp_path / "libascendcl.so").touch()
    code = f"""
import sys
import inferplane_npu.plugin
assert "inferplane_npu.backend" not in sys.modules, "the plugin imports its backend"
import torch
from inferplane_npu import backend as module
from inferplane.plugin import KVRequest
module.DEVICE_NODES = {str(tmp_path / "libascendcl.so")!r}
backend = module.NpuBackend()
assert backend.probe().available, backend.probe()
backend.kernels(), backend.features(), backend.comm(), backend.kv_layouts(KVRequest("mla", 1, 576), torch.bfloat16)
assert not set({VENDORS!r}) & set(sys.modules), "a vendor's package was imported"
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "LD_LIBRARY_PATH": str(tmp_path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
