"""How Intel GPUs are recognised. No GPU is needed."""

from __future__ import annotations

import sys

import pytest
import torch

from inferplane.plugin import DeviceError, Presence
from inferplane_xpu import plugin
from inferplane_xpu.intel import chips
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun.backend import KunlunBackend
from tests.vendors.probes import RecognitionTests


class TestIntel(RecognitionTests):
    backend, plugin, registered = IntelBackend, plugin, ["xpu:intel", "xpu:kunlun"]
    versions, count = {"torch": "2.13.0", "xpu": "20250201"}, None
    nodes, no_node = ["dev/renderD128", "dev/renderD129"], ("no Intel GPU is at", "Level Zero")
    opened, memory, fp8 = ("xpu:1", "Intel(R) Arc(TM) B580 Graphics", "bmg"), (12, 11), None
    called, variables, look = "xpu:2", ["ZE_AFFINITY_MASK"], "sycl-ls"
    absent, collectives = "a build without XPU", "xccl"

    @pytest.fixture
    def done(self, intel_gpus):
        return intel_gpus.done


def test_intel_available_names_the_node_and_opens_for_int8(intel_gpus):
    assert "renderD128" in IntelBackend.probe().reason
    assert IntelBackend(1).open().features["int8-dot"].present


def test_intel_index_names_every_variable(intel_gpus, monkeypatch):
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1")
    with pytest.raises(DeviceError) as caught:
        IntelBackend(2).open()
    assert "ZE_AFFINITY_MASK=0,1, ONEAPI_DEVICE_SELECTOR=not set" in caught.value.there_is


def test_intel_build_without_xpu(machine):
    probe = IntelBackend.probe()
    assert probe.presence is Presence.ABSENT
    assert "torch 2.13.0 is a build without XPU, and no Intel GPU is visible" in probe.reason
    assert "https://download.pytorch.org/whl/xpu" in probe.remedy
    assert "Level Zero" in probe.remedy


def test_intel_gpu_without_an_xpu_build_asks_only_for_torch(intel_gpus, monkeypatch):
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: False)
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


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Intel(R) Arc(TM) B580 Graphics", "bmg"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "bmg"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("Intel(R) Arc(TM) A770 Graphics", "dg2"),
        ("Intel(R) Data Center GPU Flex 170", "dg2"),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", "lnl"),
        ("Intel(R) Graphics", "xe"),
    ],
)
def test_intel_architecture_of_a_name(name, arch):
    assert chips.arch_of(name) == arch


def test_intel_kernels_made_for_this_torch(intel_gpus, xpu_kernels):
    xpu_kernels("0.1.13", "2.13.0+xpu")
    probe = IntelBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert probe.versions["vllm-xpu-kernels"] == "0.1.13"
    assert "vllm-xpu-kernels 0.1.13" in probe.reason
    assert "vllm_xpu_kernels" not in sys.modules


def test_intel_kernels_made_for_another_torch_are_refused(intel_gpus, xpu_kernels):
    """Both versions are named, and both ways out."""
    xpu_kernels("0.1.16.2", "2.14.0+xpu")
    probe = IntelBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "vllm-xpu-kernels 0.1.16.2 is made for torch 2.14.0+xpu, this is torch 2.13.0" in probe.reason
    assert "install torch 2.14" in probe.remedy and "pip uninstall vllm-xpu-kernels" in probe.remedy
    with pytest.raises(DeviceError, match=r"is made for torch 2\.14"):
        IntelBackend().open()


def test_intel_kernels_that_are_too_old_are_refused(intel_gpus, xpu_kernels):
    xpu_kernels("0.1.8", "2.13.0+xpu")
    probe = IntelBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "vllm-xpu-kernels 0.1.8 is here, and the oldest whose operators are known is 0.1.12" in probe.reason


def test_intel_kernels_that_do_not_say_are_tried(intel_gpus, xpu_kernels):
    """Their libraries do not load, so their kernels are refused with the reason and torch's own serve."""
    xpu_kernels("0.1.20", None)
    assert IntelBackend.probe().presence is Presence.AVAILABLE
    features = IntelBackend().open().features
    assert features["vllm-xpu-kernels"].present is False
    assert "_C.abi3.so does not load" in features["vllm-xpu-kernels"].reason
    assert features["xe2-kernels"].present is False


def test_intel_without_the_extension(intel_gpus):
    features = IntelBackend().open().features
    assert "vllm-xpu-kernels is not installed (pip install" in features["vllm-xpu-kernels"].reason
    assert features["int4-product"].present is False, "a build of torch without XPU has no such product"
    assert "no _weight_int4pack_mm_with_scales_and_zeros for XPU" in features["int4-product"].reason


def test_intel_half_an_extension(intel_gpus, xpu_kernels, machine):
    xpu_kernels("0.1.20", None)
    (machine / "site/vllm_xpu_kernels/_C.abi3.so").unlink()
    assert "vllm-xpu-kernels 0.1.20 has no library _C" in IntelBackend().open().features["vllm-xpu-kernels"].reason


def test_intel_assumed_features():
    assert IntelBackend().features("dg2")["xe2-kernels"].present is False
    assert all(IntelBackend().features(arch)["xe2-kernels"].present for arch in ("bmg", "lnl", "pvc"))
