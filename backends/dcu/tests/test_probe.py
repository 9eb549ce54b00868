"""How Hygon DCUs are recognised, on machines made of files and patched torch builds. No DCU is needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from inferplane.plugin import DeviceError, KVRequest, Presence
from inferplane_dcu import backend, plugin, versions
from inferplane_dcu.backend import DcuBackend, features_of
from tests.vendors.probes import RecognitionTests


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for the root of a machine with a HIP build of torch and nothing else."""
    for name in ("dev", "opt", "nodes"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(backend, "COMPUTE_NODE", str(tmp_path / "dev/kfd"))
    monkeypatch.setattr(backend, "TOPOLOGY", str(tmp_path / "nodes/*/properties"))
    monkeypatch.setattr(backend, "VENDOR_PATHS", (str(tmp_path / "dev/mkfd"), str(tmp_path / "opt/dtk")))
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    monkeypatch.setattr(versions, "TOOLKIT", str(tmp_path / "opt/dtk/.info/rocm_version"))
    monkeypatch.setattr(versions, "read_installed", dict)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.3.26093")
    for variable in backend.VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def add_gpus(machine, *versions):
    """GPUs as the kernel driver lists them, after a CPU."""
    (machine / "dev/kfd").touch()
    for index, version in enumerate((0, *versions)):
        (machine / f"nodes/{index}").mkdir()
        (machine / f"nodes/{index}/properties").write_text(
            f"simd_count 256\ngfx_target_version {version}\nvendor_id 1\n"
        )


@pytest.fixture
def dcus(machine, monkeypatch):
    """The same with DTK and two BW1000s that HIP can use; returns what was done to them."""
    add_gpus(machine, 90306, 90306)
    (machine / "dev/mkfd").touch()
    (machine / "opt/dtk").mkdir()
    properties = SimpleNamespace(name="BW200, UBB BW1000", gcnArchName="gfx936:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (50, 64))
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(DcuBackend, "touch", lambda self: done.append(self.torch_device_indexed))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: done.append("synchronize"))
    return SimpleNamespace(properties=properties, done=done)


class TestDcu(RecognitionTests):
    backend, plugin, registered = DcuBackend, plugin, ["dcu"]
    versions = {"torch": "2.9.0", "hip": "6.3.26093"}
    nodes, no_node = ["dev/kfd"], ("no DCU is", "/dev/mkfd")
    opened, memory = ("cuda:1", "BW200, UBB BW1000", "gfx936"), (64, 50)
    called, variables = "DCU 2", ["HIP_VISIBLE_DEVICES"]
    look, absent, collectives = "hy-smi", "nothing of Hygon's is here", "nccl"

    @pytest.fixture
    def done(self, dcus):
        return dcus.done

    def test_every_declared_kernel_exists(self):
        """Functions behind dotted names are looked for in the source: importing them takes what only a DCU machine
        has.
        """
        kernels = DcuBackend().kernels()
        assert {kernel.provider for kernel in kernels} >= {"lightop", "hcu_ops", "flash_attn", "flash_mla", "triton"}
        for kernel in kernels:
            if callable(kernel.target):
                continue
            module, _, name = kernel.target.partition(":")
            source = Path(find_spec(module).origin).read_text(encoding="utf-8")
            assert f"def {name}(" in source, kernel.target


def test_available_names_the_chips(dcus):
    assert "gfx936 (BW1000)" in DcuBackend.probe().reason


@pytest.mark.parametrize(("cuda", "words"), [(None, "a build without HIP"), ("12.6", "built for CUDA 12.6")])
def test_build_without_hip(dcus, monkeypatch, cuda, words):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    probe = DcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert f"torch 2.9.0 is {words}" in probe.reason
    assert "DTK" in probe.remedy


def test_nothing_of_hygons(machine):
    probe = DcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "nothing of Hygon's is here" in probe.reason
    assert "hy-smi" in probe.reason
    assert "DTK" in probe.remedy


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (91000, "gfx9a0"), (110000, "gfx1100"), (90006, "gfx906")],
)
def test_an_amd_machine_is_not_a_dcu(machine, version, name):
    add_gpus(machine, version)
    probe = DcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert f"the GPUs here are {name}, not Hygon's" in probe.reason


def test_a_torch_of_hygons_is_a_sign(machine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0+das.opt1.dtk2604")
    probe = DcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "a torch built for DTK" in probe.reason and "no DCU is" in probe.reason


@pytest.mark.parametrize(
    ("torch_version", "packages", "toolkit", "words"),
    [
        ("2.11.0+das.opt1.dtk2604", {"lightop": "0.6.0+das.dtk2604.torch271"}, "26.04", ("torch 2.7", "2.11.0+das")),
        ("2.7.1+das.opt1.dtk2504", {"flash_attn": "2.8.3+das.opt1.dtk2604"}, "25.04.4", ("DTK 26.04", "DTK 25.04")),
        ("2.7.1+das.opt1.dtk25041", {}, "26.04", ("built for DTK 25.04", "here is DTK 26.04")),
    ],
    ids=["torch", "toolkits of wheels", "toolkit here"],
)
def test_wheels_of_two_releases_are_refused(dcus, machine, monkeypatch, torch_version, packages, toolkit, words):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(versions, "read_installed", lambda: packages)
    (machine / "opt/dtk/.info").mkdir()
    (machine / "opt/dtk/.info/rocm_version").write_text(toolkit + "\n")
    probe = DcuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert all(word in probe.reason for word in words), probe.reason
    assert "of one DAS release" in probe.remedy
    assert packages.items() <= probe.versions.items()
    with pytest.raises(DeviceError, match="built for"):
        DcuBackend().open()
    assert not dcus.done, "the device was touched"


def test_wheels_of_one_release_fit(dcus, machine, monkeypatch):
    packages = {
        "lightop": "0.6.0+das.dtk2604.torch2110.2608171227.g8c835c",
        "flash_attn": "2.8.4+dtk2604.torch2110.2609241509.g624d7b",
        "lmslim": "0.3.1",
        "triton": "3.3.0+das.opt1.dtk2604",
    }
    monkeypatch.setattr(torch, "__version__", "2.11.0+das.opt1.dtk2604.202604021232.g1175f0")
    monkeypatch.setattr(versions, "read_installed", lambda: packages)
    (machine / "opt/dtk/.info").mkdir()
    (machine / "opt/dtk/.info/rocm_version").write_text("26.04.1")
    probe = DcuBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions["lightop"] == packages["lightop"]


def test_toolkit_without_a_device(machine):
    (machine / "opt/dtk").mkdir()
    probe = DcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "no DCU is" in probe.reason
    assert "/dev/mkfd" in probe.remedy


@pytest.mark.parametrize("version", [90208, 90306, 90308, 90406, 90210])
def test_a_hygon_name_needs_no_other_sign(machine, version):
    add_gpus(machine, version)
    assert DcuBackend.probe().presence is Presence.AVAILABLE


def test_the_installation_decides_whose_gfx906_it_is(machine):
    add_gpus(machine, 90006)
    (machine / "dev/mkfd").touch()
    assert DcuBackend.probe().presence is Presence.AVAILABLE


def test_signs_of_hygon_outweigh_an_unreadable_name(machine):
    add_gpus(machine, 936)
    (machine / "dev/mkfd").touch()
    probe = DcuBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert "opening will tell" in probe.reason
    assert probe.devices is None


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_hidden_dcus(dcus, monkeypatch, variable):
    monkeypatch.setenv(variable, "-1")
    probe = DcuBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert f"{variable}='-1'" in probe.reason
    assert f"unset {variable}" in probe.remedy


def test_open_of_an_amd_gpu(dcus):
    dcus.properties.name, dcus.properties.gcnArchName = "AMD Instinct MI300X", "gfx942:sramecc+:xnack-"
    with pytest.raises(DeviceError, match=r"'AMD Instinct MI300X' \(gfx942\), which is not a Hygon DCU"):
        DcuBackend().open()
    assert not dcus.done, "another vendor's GPU was touched"


def test_assumed_architectures():
    assert next(iter(DcuBackend.architectures)) == "gfx936"
    assert {"gfx906", "gfx926", "gfx928", "gfx936", "gfx938", "gfx946", "gfx92a"} == set(DcuBackend.architectures)
    assert [gfx for gfx, names in DcuBackend.architectures.items() if "fp8" in names] == ["gfx938"]
    assert dict(DcuBackend().features()) == dict(features_of("gfx936"))
    assert "gfx938 alone" in features_of("gfx928")["fp8"].reason
    assert features_of("gfx906")["bf16"].present is None, "what no source says is unknown"
    assert not features_of("sm90a"), "another vendor's architecture is unknown in everything"


def test_blocks_of_64_tokens_for_every_kind_of_layer():
    for request, kv_dtypes in (
        (KVRequest("gqa", 8, 128, 128), ["auto", "auto", "int8"]),
        (KVRequest("gqa", 8, 80, 80), ["auto", "int8"]),
        (KVRequest("gqa", 2, 320, 320), ["auto", "int8"]),
        (KVRequest("mla", 1, 576), ["auto", "int8", "fp8", "fp8"]),
        (KVRequest("mla", 1, 96), ["auto", "int8", "fp8"]),
    ):
        layouts = DcuBackend().kv_layouts(request, torch.bfloat16)
        assert {layout.block_tokens for layout in layouts} == {64}
        assert [layout.kv_dtype for layout in layouts] == kv_dtypes
        assert (layouts[0].name == "dcu_heads_64") == (kv_dtypes[1] == "auto"), "the vendor's own layout first"
