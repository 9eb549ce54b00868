"""The gated delta rule on Atlas A2: its operators round the states, so they are for a pin."""

from __future__ import annotations

import pytest

from tests.vendors.engine import serve
from tests.vendors.npu import chip
from tests.vendors.profile import in_vendor_dtypes

pytestmark = [in_vendor_dtypes, pytest.mark.skipif(chip.ARCH != "910b", reason="on the 910b, whose states are 16 bits")]


@pytest.mark.parametrize("pins", [{}, {"gated_delta_rule": "torch_npu"}], ids=["by_rank", "pinned"])
def test_a_pin_alone_chooses_rounded_states(pins):
    plan = serve("npu", chip.DTYPE, "qwen3_5", ops=pins)
    chosen = {site["chosen"]["kernel"] for site in plan["sites"] if site["op"] == "gated_delta_rule"}
    assert chosen == ({"torch_npu:gated_delta_rule_bf16"} if pins else {"reference"})
