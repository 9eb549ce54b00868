"""How much of a step runs on the vendor's operators, by number of sites, at published sizes, without a GCU."""

from __future__ import annotations

from inferplane_gcu.backend import GcuBackend
from tests.vendors.share import KINDS, PUBLISHED, bound, check

VENDOR = ("vllm_gcu", "flash_attn")


@PUBLISHED
@KINDS
def test_a_step_is_the_vendors(config, kind, record_property):
    check(bound(GcuBackend(), config, "s60", kind), VENDOR, record_property)
