"""How Kunlun cards are recognised. No card is needed."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from inferplane.plugin import DeviceError, Presence
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun import backend as kunlun
from inferplane_xpu.kunlun.backend import KunlunBackend


def test_kunlun_nothing_installed(machine, monkeypatch):
    monkeypatch.setattr(kunlun, "installed", lambda module: False)
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
    done = ["torch_xmlir", 1, "cuda:1", "synchronize"]
    assert kunlun_cards == done, "imported, current device set, one allocation, waited for"


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
    monkeypatch.setattr(kunlun, "installed", lambda module: False)
    with pytest.raises(DeviceError, match="torch_xmlir is not installed") as caught:
        KunlunBackend().open()
    assert caught.value.remedy == KunlunBackend.probe().remedy


def test_a_package_imported_by_hand_counts_as_installed(machine, monkeypatch):
    module = ModuleType("torch_xmlir")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch_xmlir", module)
    assert KunlunBackend.probe().presence is Presence.BROKEN
    assert "Kunlun" in IntelBackend.probe().reason
