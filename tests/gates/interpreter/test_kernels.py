"""Every portable kernel on every sample of its op, against the op's own body in float32, in Triton's interpreter."""

from __future__ import annotations

import pytest

from inferplane.binding import run_case
from inferplane.ops import OPS
from tests.gates.interpreter.benches import DTYPES, KERNELS, LAYOUTS, bench

OF_STATES = ("causal_conv1d", "gated_delta_rule", "selective_scan")
"""Ops that read and write a state of each sequence."""
EVERYWHERE = ("decode", "drafts", "chunks", "mixed", "window_prefill", "sinks_decode", "softcap_window")
"""Samples that are run on every layout, in bfloat16; the others on the plain one alone."""
FEWER = {"index_select": ("decode",)}
"""The same of ops that take long."""


def cases():
    found = []
    for kernel in KERNELS:
        for sample in OPS[kernel.op].samples():
            if not set(sample.op.formats()) <= set(kernel.when.formats):
                continue  # the plane expands such weights for it
            if kernel.when.refuse_extensions(sample.op.extensions()):
                continue  # the plane serves it with another kernel
            if kernel.when.step_kinds and sample.step_kind not in kernel.when.step_kinds:
                continue
            if not sample.op.kv_requests():
                names = ["float32"] if kernel.op == "sample" else DTYPES  # logits are float32 in every plan
                found += [(kernel, sample, name, None) for name in names]
                continue
            found += [(kernel, sample, n, "paged_64") for n, d in DTYPES.items() if d in kernel.when.dtypes]
            if sample.label in FEWER.get(kernel.op, EVERYWHERE):
                found += [(kernel, sample, "bfloat16", x.name) for x in LAYOUTS if x.name != "paged_64"]
    return found


@pytest.mark.parametrize(("kernel", "sample", "dtype", "layout"), cases(), ids=lambda x: str(getattr(x, "label", x)))
def test_agrees_with_the_oracle(kernel, sample, dtype, layout, record_property):
    record_property("op", kernel.op)
    record_property("kernel", kernel.name)
    worst = 0.0
    cached = sample.op.kv_requests() or kernel.op in OF_STATES
    steps = sample.step_kind == "decode" and cached  # only a step of sequences can be padded
    for seed, padded in ((1, False), (2, True)) if steps else ((1, False),):
        outcome = run_case(kernel, sample, bench(DTYPES[dtype], layout), seed=seed, padded=padded, poisoned=True)
        assert outcome.served, outcome.detail
        assert outcome.passed, f"{outcome.error} > {outcome.tolerance} {outcome.detail}\n{outcome.traceback}"
        worst = max(worst, outcome.error)
    record_property("error", worst)
    record_property("tolerance", outcome.tolerance)
