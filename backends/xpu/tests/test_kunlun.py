"""How Kunlun cards are recognised. No card is needed."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from inferplane.plugin import Presence
from inferplane_xpu import plugin
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun import backend as kunlun
from inferplane_xpu.kunlun.backend import KunlunBackend
from tests.vendors.probes import PackageTests


class TestKunlun(PackageTests):
    backend, plugin, registered = KunlunBackend, plugin, ["xpu:intel", "xpu:kunlun"]
    package, device, remedies = "torch_xmlir", ("a Kunlun card", "Kunlun card"), ["xpytorch"]
    versions = {"torch": "2.5.1+cu118", "torch_xmlir": "1.0.0"}
    nodes, no_node = ["dev/xpu0", "dev/xpu1"], ("no Kunlun card is", "/dev/xpuctrl")
    opened, memory, imported = ("cuda:1", "KUNLUN P800", "p800"), (96, 90), ["torch_xmlir"]
    called, variables = "Kunlun card 2", kunlun.VISIBLE
    look, absent, collectives = "xpu-smi", "torch_xmlir is not installed", "nccl"
    import_error = r"libxpurt\.so"

    @pytest.fixture
    def done(self, kunlun_cards):
        return kunlun_cards

    def restore_import(self, monkeypatch):
        monkeypatch.setattr(kunlun, "import_module", import_module)


def test_kunlun_with_a_foreign_torch_is_broken(kunlun_cards, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    probe = KunlunBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "torch 2.5.1+cu118 is not the vendor's" in probe.reason
    assert "xpytorch" in probe.remedy


def test_a_package_imported_by_hand_counts_as_installed(machine, monkeypatch):
    module = ModuleType("torch_xmlir")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch_xmlir", module)
    assert KunlunBackend.probe().presence is Presence.BROKEN
    assert "Kunlun" in IntelBackend.probe().reason
