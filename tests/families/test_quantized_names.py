"""Names of linear weights, by family: a scheme quantizes all but routers and gates, whatever checkpoints call them."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from inferplane.models import Build, Config, build
from inferplane.ops import Linear
from inferplane.quant import online
from tests.families import cases

PLAIN = (
    "*.gate.weight",
    "*.gate.wg.weight",
    "*.router.weight",
    "*.router.layer.weight",
    "*.router.classifier.weight",
    "*.shared_expert_gate.weight",
    *online.INDEX,
)
"""Routers, gates of shared experts, and the parts of indexers that only decide which tokens are read."""
RATES = ("*.in_proj_a.weight", "*.in_proj_b.weight", "*.in_proj_ba.weight", *online.GATES)
"""Rates of delta nets, a number a head, or a channel through a low rank."""


@pytest.mark.parametrize("family", cases.ALL_CASES)
def test_every_linear_weight_has_a_role(family: str) -> None:
    for case in cases.ALL_CASES[family]:
        model = build(Build(Config(cases.config_of(family, case).to_dict(), family)))
        names = [name for _, op in model.sites() if isinstance(op, Linear) for name in op.weight.parts]
        assert names
        without = [n for n in names if not online.find_role(n) and not any(fnmatchcase(n, p) for p in (*PLAIN, *RATES))]
        assert not without, f"{case}: left in 16 bits: {without}"
