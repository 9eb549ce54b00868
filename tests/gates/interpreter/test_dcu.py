"""The portable attention kernels with the tile sizes that device "dcu" gives them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inferplane.binding import Bench, run_case
from inferplane.ops import OPS
from inferplane.plugin import HOST, Features
from inferplane_dcu.kernels import TILES, kernels
from inferplane_dcu.kvcache import PAGED, layouts

OF_ATTENTION = {"attention", "mla_absorbed", "mla_expanded"}
ATTENTION = [k for k in kernels() if k.provider == "triton" and k.op in OF_ATTENTION]
LABELS = ("decode", "window_prefill", "prefill_d128", "v3_dims", "sinks_decode", "softcap_window")
CASES = [
    (k, s, x) for k in ATTENTION for s in OPS[k.op].samples() if s.label in LABELS for x in (PAGED, f"{PAGED}_int8")
]


def test_every_attention_kernel_is_here():
    assert {k.op for k in ATTENTION} == OF_ATTENTION
    assert all(k.prepare == TILES.prepare for k in ATTENTION)


@pytest.mark.parametrize(("kernel", "sample", "layout"), CASES, ids=lambda x: str(getattr(x, "label", x)))
def test_agrees_with_the_oracle(kernel, sample, layout):
    bench = Bench("interpreter", HOST, torch.bfloat16, Features(["triton"]), layouts, layout)
    outcome = run_case(kernel, sample, bench, seed=3, poisoned=True)
    assert outcome.served, outcome.detail
    assert outcome.passed, f"{outcome.error} > {outcome.tolerance} {outcome.detail}\n{outcome.traceback}"
