"""The family's bare name with the real plugin, both vendors or one of them visible."""

from __future__ import annotations

import pytest

from inferplane.plugin import DeviceError, Presence, Probe
from inferplane.plugins import discover
from inferplane_xpu.backend import IntelBackend, KunlunBackend

ONLY = "only,inferplane_xpu.plugin"


def here() -> Probe:
    return Probe(Presence.AVAILABLE, "a card is there", devices=1)


def absent() -> Probe:
    return Probe(Presence.ABSENT, "no card is there", "put one in")


def test_both_visible_is_refused_with_both_named(monkeypatch):
    for variant in (IntelBackend, KunlunBackend):
        monkeypatch.setattr(variant, "probe", here)
    host = discover(ONLY)
    for ask in (host.choose, host.backend, host.backend_for_explain):
        with pytest.raises(DeviceError) as caught:
            ask("xpu")
        assert all(words in str(caught.value) for words in ("xpu:intel", "xpu:kunlun", "more than one"))
    assert host.backend("xpu:kunlun").name == "xpu:kunlun"
    assert host.backend("xpu:intel").name == "xpu:intel"


@pytest.mark.parametrize(("visible", "other"), [(KunlunBackend, IntelBackend), (IntelBackend, KunlunBackend)])
def test_the_one_that_is_visible_is_taken(monkeypatch, visible, other):
    monkeypatch.setattr(visible, "probe", here)
    monkeypatch.setattr(other, "probe", absent)
    assert discover(ONLY).backend("xpu").name == visible.name


def test_neither_visible_names_both(monkeypatch):
    for variant in (IntelBackend, KunlunBackend):
        monkeypatch.setattr(variant, "probe", absent)
    with pytest.raises(DeviceError) as caught:
        discover(ONLY).backend("xpu")
    assert all(words in str(caught.value) for words in ("xpu:intel", "xpu:kunlun"))
