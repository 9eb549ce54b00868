"""The ops' samples tell a kernel that leaves a field unread, in every dtype."""

import math
from typing import Any

import pytest
import torch.nn.functional as F

from inferplane.binding import Bench, run_case
from inferplane.kvcache import paged_layout
from inferplane.ops import OPS
from inferplane.types import Features
from tests.unit.support.small import DTYPES, kernel


def by_itself(p: Any) -> float:
    """The scale that attention takes where none is given."""
    return (p.dims.nope + p.dims.rope if hasattr(p, "dims") else p.kv.dim) ** -0.5


class Ignoring:
    """A bound op with one field as a kernel takes it that does not read it."""

    def __init__(self, p: Any, field: str, taken: Any) -> None:
        self._p, self._field, self._taken = p, field, taken

    def __getattr__(self, name: str) -> Any:
        if name != self._field:
            value = getattr(self._p, name)
            return (lambda x: F.linear(x, value.weight)) if hasattr(value, "weight") else value
        return self._taken(self._p) if callable(self._taken) else self._taken


FIELDS = [
    ("attention", "few", "scale", by_itself),
    ("attention", "many", "scale", by_itself),
    ("mla_absorbed", "", "scale", by_itself),
    ("mla_expanded", "", "scale", by_itself),
    ("rms_norm", "", "eps", 0.0),
    ("moe_route", "softmax", "factor", 1.0),
    ("moe_route", "softmax", "group_score", "max"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "only", "field", "taken"), FIELDS)
def test_a_field_left_unread_is_told(op, only, field, taken, dtype):
    samples = [s for s in OPS[op].samples() if only in ("", getattr(s.op, "queries", getattr(s.op, "score", "")))]
    if field == "factor":
        samples = [s for s in samples if s.op.groups == 1]
    bench = Bench("toy", "cpu", dtype, Features(), lambda request: [paged_layout(16)])
    careless = kernel(op, target=lambda p, *args: OPS[op].__call__(Ignoring(p, field, taken), *args))
    outcomes = [o for o in (run_case(careless, s, bench, seed=3) for s in samples) if o.served]
    assert all(math.isfinite(o.error) for o in outcomes), "it only leaves a field unread"
    assert not all(o.passed for o in outcomes), f"{field} may be left unread"
