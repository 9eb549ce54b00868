"""Versions that fit each other, and the vendor's libraries by name. No card is needed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.plugin import DeviceError, Presence
from inferplane_xpu.kunlun import operators
from inferplane_xpu.kunlun.backend import KunlunBackend
from inferplane_xpu.library import Library


def install(machine, name, version, source=""):
    (machine / "site" / name).mkdir()
    (machine / f"site/{name}/__init__.py").write_text(source)
    (machine / f"site/{name}-{version}.dist-info").mkdir()
    (machine / f"site/{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    importlib.invalidate_caches()


def test_a_torch_that_is_too_old_is_refused_with_both_versions(kunlun_cards, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu118")
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "torch_xmlir 1.0.0" in probe.reason and "torch 2.4.1+cu118" in probe.reason
    with pytest.raises(DeviceError, match=r"torch 2\.4\.1"):
        KunlunBackend().open()


def test_libraries_of_two_releases_are_refused_with_both_versions(kunlun_cards, machine):
    install(machine, "xspeedgate_ops", "1.1.0+53992ca", "raise SystemExit('imported')")
    assert KunlunBackend.probe().available, "one of the two alone says nothing"
    install(machine, "cocopod", "1.0.0", "raise SystemExit('imported')")
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "xspeedgate_ops 1.1.0+53992ca" in probe.reason and "cocopod 1.0.0" in probe.reason
    assert "of one number" in probe.remedy


def test_libraries_of_one_release_are_taken(kunlun_cards, machine):
    install(machine, "xspeedgate_ops", "1.1.0+53992ca")
    install(machine, "cocopod", "1.1.0")
    assert KunlunBackend.probe().available


def test_without_libraries_the_card_runs_on_torch(kunlun_cards, machine):
    features = KunlunBackend().open().features
    for name, library in (("kunlun-ops", "kunlun_ops"), ("xspeedgate-ops", "xspeedgate_ops")):
        assert features[name].present is False and f"{library} is not installed" in features[name].reason
    assert features["group-topk"].present is False
    assert features["bf16"].present


def test_a_library_that_cannot_be_imported_is_reported(kunlun_cards, machine):
    install(machine, "kunlun_ops", "0.1.58", "raise OSError('libxpuapi.so: cannot open\\n shared object file')")
    reason = KunlunBackend().open().features["kunlun-ops"].reason
    assert reason == "kunlun_ops cannot be imported: OSError: libxpuapi.so: cannot open shared object file"


def test_a_library_without_a_name_is_not_used_and_says_which(kunlun_cards, machine):
    names = [name for name in operators.KUNLUN_OPS if name not in ("awq_gemm", "matmul")]
    install(machine, "kunlun_ops", "0.1.40", "\n".join(f"{name} = print" for name in names))
    features = KunlunBackend().open().features
    assert features["kunlun-ops"].reason == "kunlun_ops here has no matmul, awq_gemm"
    assert features["kunlun-ops"].present is features["group-topk"].present is False


def test_whole_libraries_are_used(kunlun_cards, machine, monkeypatch):
    """A function of a later release has a feature of its own."""
    everything = "\n".join(f"{name} = print" for name in operators.KUNLUN_OPS)
    install(machine, "kunlun_ops", "0.1.58", f"import cocopod\n{everything}")
    install(machine, "cocopod", "1.1.0")
    install(machine, "xspeedgate_ops", "1.1.0")
    monkeypatch.setattr(torch.ops, "xspeedgate_ops", SimpleNamespace(moe_pre_small=print), raising=False)
    features = KunlunBackend().open().features
    assert features["kunlun-ops"].present and features["xspeedgate-ops"].present
    assert features["group-topk"].reason == "kunlun_ops here has no moe_group_topk"
    for name in ("kunlun_ops", "cocopod", "xspeedgate_ops"):
        sys.modules.pop(name)


def test_a_library_is_imported_when_something_of_it_is_called(monkeypatch):
    library = Library("inferplane_test_library")
    with pytest.raises(ModuleNotFoundError):
        library.f()
    module = ModuleType("inferplane_test_library")
    module.f = lambda: 7
    monkeypatch.setitem(sys.modules, "inferplane_test_library", module)
    assert library.f() == 7
    monkeypatch.delitem(sys.modules, "inferplane_test_library")
    assert library.f() == 7, "found once"
    assert not hasattr(library, "__wrapped__")
