"""How much of a step runs on the vendor's functions, by number of sites, at published sizes, without a DCU."""

from __future__ import annotations

import pytest

from inferplane_dcu.backend import DcuBackend
from tests.vendors.share import KINDS, PUBLISHED, check, count_providers

VENDOR = ("lightop", "hcu_ops", "flash_attn", "flash_mla")


@PUBLISHED
@KINDS
@pytest.mark.parametrize("arch", ["gfx936", "gfx928"])
def test_a_step_is_the_vendors(config, kind, arch, record_property):
    check(count_providers(DcuBackend(), config, arch, kind), VENDOR, record_property, portable=("triton",))
