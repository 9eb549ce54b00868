"""Machines made of files and patched torch builds, for the tests beside this file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane_xpu.intel import backend as intel
from inferplane_xpu.kunlun import backend as kunlun
from tests.vendors.probes import forget_packages, install


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
    for variable in (*intel.VISIBLE, *kunlun.VISIBLE):
        monkeypatch.delenv(variable, raising=False)
    forget_packages(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def install_torch_xmlir(machine):
    """torch_xmlir as the vendor's image has it; importing it fails, as it does without the driver."""
    error = "raise ImportError('libxpurt.so: cannot open shared object')"
    install(machine / "site", "torch_xmlir", "1.0.0", code=error)


@pytest.fixture
def xpu_kernels(machine):
    """`(version, torch)` -> vllm-xpu-kernels as pip installs it, made for a torch; its libraries are no libraries."""

    def install(version, built_with):
        site = machine / "site"
        (site / "vllm_xpu_kernels").mkdir()
        (site / "vllm_xpu_kernels/__init__.py").write_text("raise SystemExit('vllm_xpu_kernels was imported')")
        for name in ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C"):
            (site / f"vllm_xpu_kernels/{name}.abi3.so").write_text("no library")
        folder = site / f"vllm_xpu_kernels-{version}.dist-info"
        folder.mkdir()
        page = f"- **Python**: 3.12\n- **PyTorch**: {built_with}\n" if built_with else "A page.\n"
        (folder / "METADATA").write_text(f"Name: vllm-xpu-kernels\nVersion: {version}\n\n{page}")

    return install


def note_selection(monkeypatch, backend, runtime, done):
    """What opening does to the device goes to `done`, not to a device."""
    monkeypatch.setattr(runtime, "set_device", done.append)
    monkeypatch.setattr(runtime, "synchronize", lambda index: done.append("synchronize"))
    monkeypatch.setattr(backend, "touch", lambda self: done.append(self.torch_device_indexed))


@pytest.fixture
def intel_gpus(machine, monkeypatch):
    """The same with an XPU build of torch and two Arc B580s; returns what torch reports and what was done."""
    for node in ("renderD128", "renderD129"):
        (machine / "dev" / node).touch()
        (machine / "sys" / node).write_text("0x8086\n")
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
    note_selection(monkeypatch, intel.IntelBackend, torch.xpu, done)
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
    note_selection(monkeypatch, kunlun.KunlunBackend, torch.cuda, done)
    monkeypatch.setattr(kunlun, "import_module", lambda name: name in done or done.append(name))
    return done
