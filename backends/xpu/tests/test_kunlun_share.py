"""How much of a step runs on Kunlun's functions, by number of sites, at published sizes, without a card."""

from __future__ import annotations

from inferplane_xpu.kunlun.backend import KunlunBackend
from tests.vendors.share import KINDS, PUBLISHED, check, count_providers

VENDOR = ("kunlun_ops",)


@PUBLISHED
@KINDS
def test_a_step_is_the_vendors(config, kind, record_property):
    check(count_providers(KunlunBackend(), config, "p800", kind), VENDOR, record_property)
