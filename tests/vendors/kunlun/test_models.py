"""Models in float16, in which int4 weights are multiplied by the vendor's product."""

from __future__ import annotations

import pytest
import torch

from tests.vendors.kunlun.profile import PROFILE
from tests.vendors.models import errors_beside_cpu
from tests.vendors.profile import in_vendor_dtypes


@in_vendor_dtypes
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("weights", ["plain", "int4_group"])
def test_error_beside_cpu_in_float16(family, weights, monkeypatch, record_property):
    found = errors_beside_cpu(PROFILE.device, torch.float16, family, weights, "ragged", monkeypatch)
    record_property("error", found)
