"""Which known name a mistyped one is near."""

from __future__ import annotations

import pytest

from inferplane.dialogue.near_names import find_nearest

KNOWN = ("name", "role", "tool_calls", "temperature", "seed", "n")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nmae", "name"),  # two neighbours swapped are one mistake
        ("naem", "name"),
        ("rloe", "role"),
        ("nam", "name"),
        ("tool_cals", "tool_calls"),
        ("toolCalls", "tool_calls"),
        ("tempertaure", "temperature"),
        ("temperatuer", "temperature"),
        ("etmpertaure", "temperature"),
        ("esde", ""),
        ("note", ""),
        ("time", ""),
        ("m", ""),
        ("temper", ""),
        ("temperature" * 20, ""),
    ],
)
def test_the_nearest_name(name, near):
    assert find_nearest(name, KNOWN) == near
