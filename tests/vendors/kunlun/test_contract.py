"""The names that the backend looks up in the vendor's libraries, held against the call forms."""

from __future__ import annotations

from inferplane_xpu.kunlun import operators
from tests.vendors.kunlun.profile import PROFILE


def test_the_names_that_are_looked_up_are_those_that_are_called():
    """A library without one of them is not used, so the backend's list and the call forms must be the same."""
    names = {f"kunlun_ops::{name}" for name in (*operators.KUNLUN_OPS, operators.GROUP_TOPK)}
    assert names | {f"xspeedgate_ops::{name}" for name in operators.XSPEEDGATE_OPS} == set(PROFILE.restated.schemas)
