"""How much of a step runs on the vendor's operators, by number of sites, at published sizes, without a GCU."""

from __future__ import annotations

from inferplane_gcu.backend import GcuBackend
from tests.vendors.share import KINDS, PUBLISHED, check, count_providers

VENDOR = ("vllm_gcu", "flash_attn")


@PUBLISHED
@KINDS
def test_a_step_is_the_vendors(config, kind, record_property):
    check(count_providers(GcuBackend(), config, "s60", kind), VENDOR, record_property)
