"""Intel's archived extension: only its last releases, only with their own torch, and never imported to be found out."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from inferplane.plugins import discover
from inferplane_xpu.intel import ipex, processors
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.library import Library


@pytest.fixture
def extension(machine, monkeypatch):
    """`(version, body)` -> the package as pip installs it; its body runs on import."""
    ipex.usable.cache_clear()
    monkeypatch.setenv("PYTHONPATH", str(machine / "site"))

    def install(version, body=""):
        package = machine / "site" / ipex.MODULE
        package.mkdir()
        (package / "__init__.py").write_text(body)
        folder = machine / "site" / f"{ipex.MODULE}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {ipex.MODULE}\nVersion: {version}\n")

    yield install
    ipex.usable.cache_clear()


def test_not_installed(extension):
    found = ipex.usable(ipex.LAST_FOR_GPUS)
    assert found.present is False and "is not installed, and archived by Intel" in found.reason
    assert processors.kernels() == []


@pytest.mark.parametrize(
    ("version", "torch_version", "last", "words"),
    [
        ("2.7.0", "2.7.0", "2.8", "2.7.0 is not 2.8, the last release of it"),
        ("2.8.0", "2.13.0", "2.8", "2.8.0 is made for torch 2.8, this is torch 2.13.0"),
        ("2.8.0", "2.8.0", "2.10", "2.8.0 is not 2.10, the last release of it"),
    ],
)
def test_misfits_are_refused_by_metadata(extension, monkeypatch, version, torch_version, last, words):
    extension(version, "raise SystemExit('it was imported')")
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(ipex.subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    found = ipex.usable(last)
    assert found.present is False and words in found.reason


def test_an_import_that_ends_the_process_is_survived(extension, monkeypatch):
    """As the wheel does with a torch that it was not made for."""
    extension(
        "2.8.0", "import os, sys\nprint('ERROR! needs another torch', file=sys.stderr, flush=True)\nos._exit(127)"
    )
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    found = ipex.usable("2.8")
    assert found.present is False
    assert "ends the process with 127: ERROR! needs another torch" in found.reason
    assert ipex.MODULE not in sys.modules


def test_an_import_that_never_ends_is_given_up(extension, monkeypatch):
    extension("2.8.0", "import time\ntime.sleep(60)")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setattr(ipex, "PATIENCE_S", 0.5)
    assert "TimeoutExpired" in ipex.usable("2.8").reason


def test_the_last_release_with_its_torch_is_taken(extension, monkeypatch):
    extension("2.8.0")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert [kernel.op for kernel in processors.kernels()] == ["rms_norm", "add_rms_norm"]


def test_an_opened_gpu_says_what_is_left(intel_gpus, extension, monkeypatch):
    assert "is not installed" in IntelBackend().open().features["ipex"].reason
    ipex.usable.cache_clear()
    extension("2.10.10+xpu")
    monkeypatch.setattr(torch, "__version__", "2.10.0+xpu")
    assert IntelBackend().open().features["ipex"].present


def test_its_norms_are_offered_to_processors_by_the_plugin(extension, monkeypatch):
    extension("2.8.0")
    host = discover("only,inferplane_cpu.plugin,inferplane_xpu.plugin")
    assert "ipex" not in {kernel.provider for kernel in host.kernels("cpu")}, "another torch"
    ipex.usable.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    host = discover("only,inferplane_cpu.plugin,inferplane_xpu.plugin")
    assert [kernel.op for kernel in host.kernels("cpu") if kernel.provider == "ipex"] == ["rms_norm", "add_rms_norm"]


def test_a_library_may_be_a_class(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_module", SimpleNamespace(Paged=SimpleNamespace(write=3)))
    assert Library("a_module.Paged").write == 3
