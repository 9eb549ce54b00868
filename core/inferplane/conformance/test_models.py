"""Compares whole models, bound as for a user, with the same tree of ops on reference bodies in float32.

This shows what tests of single kernels cannot: that kernels agree on the data between them (a KV layout, a residual, an
order of rows), and that the result does not depend on how a prompt is divided into steps. Weights are random; logits
after every token are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch

from inferplane.binding import explain
from inferplane.conformance import stepping
from inferplane.conformance.configs import SLICES, TINY, model
from inferplane.conformance.plugin import SUBJECT
from inferplane.conformance.subject import Subject
from inferplane.engine.runner.options import DTYPES
from inferplane.ops import CausalLM

LENGTHS = (70, 19, 33)
SLICE_LENGTHS = (21, 5, 9)
LAST_COUNTS, LAST_LOGITS = (3, 1, 3), (1, 1, 2)


@dataclass(frozen=True)
class ModelCase:
    config: dict[str, Any]
    dtype: str
    schedule: str
    id: str


def pytest_generate_tests(metafunc):
    dtypes = metafunc.config.stash[SUBJECT].dtypes
    if metafunc.function is test_tiny_model:
        made = [ModelCase(c, d, s, f"{m}/{d}/{s}") for m, c in TINY.items() for d in dtypes for s in stepping.SCHEDULES]
    else:
        dtype = "bfloat16" if "bfloat16" in dtypes else next(iter(dtypes))
        some = SLICES if metafunc.function is test_two_layers_at_true_sizes else TINY
        made = [ModelCase(c, dtype, "", f"{m}/{dtype}") for m, c in some.items()]
    metafunc.parametrize("case", made, ids=lambda c: c.id)


def bind_twice(case: ModelCase, device: Subject, lengths: tuple[int, ...], *, steady_routes: bool) -> tuple[Any, ...]:
    """The model on references and on the device, with the same weights, and random prompts of these lengths."""
    tree, dtype = model(case.config), DTYPES[case.dtype]
    weights = stepping.draw_weights(tree, dtype, steady_routes=steady_routes)
    reference = stepping.on_references(tree, weights, max(lengths))
    bound = stepping.on_device(device, tree, dtype, weights, max(lengths))
    return reference, bound, draw_prompts(lengths, case.config["vocab_size"])


def test_tiny_model(case, device, measured):
    """A few layers, three sequences in one batch."""
    reference, bound, prompts = bind_twice(case, device, LENGTHS, steady_routes=case.dtype != "float32")
    want = stepping.run(reference, prompts, stepping.SCHEDULES["whole_prompt"])
    got = stepping.run(bound, prompts, stepping.SCHEDULES[case.schedule])
    compare(case, bound, got, want, measured)


def test_results_of_a_step(case, device, measured):
    """A step of few tokens returns the hidden states of all rows, and logits of the requested rows."""
    reference, bound, prompts = bind_twice(case, device, SLICE_LENGTHS, steady_routes=True)
    for one in (reference, bound):
        stepping.run(one, prompts, stepping.SCHEDULES["whole_prompt"])
    logits, hidden = stepping.last_step(reference, prompts, LAST_COUNTS, (None, None, None))
    some, states = stepping.last_step(bound, prompts, LAST_COUNTS, LAST_LOGITS)
    last_rows = accumulate(LAST_COUNTS)
    rows = [row for end, count in zip(last_rows, LAST_LOGITS, strict=True) for row in range(end - count, end)]
    compare(case, bound, [some, states], [logits[rows], hidden], measured)


@pytest.mark.slow
def test_two_layers_at_true_sizes(case, device, measured):
    """Widths of real models, with full tiles and large workspaces: a prompt, then single tokens."""
    reference, bound, prompts = bind_twice(case, device, SLICE_LENGTHS, steady_routes=True)
    want = stepping.run(reference, prompts, stepping.SCHEDULES["whole_prompt"])
    got = stepping.run(bound, prompts, lambda sequence, done, total: 1 if done else total - 2)
    compare(case, bound, got, want, measured)


def draw_prompts(lengths: tuple[int, ...], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def compare(
    case: ModelCase, bound: stepping.Bound, got: list[torch.Tensor], want: list[torch.Tensor], measured
) -> None:
    tolerance = CausalLM.tolerance[DTYPES[case.dtype]]
    worst, where = 0.0, ""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape, f"result {i}: {list(g.shape)} instead of {list(w.shape)}"
        off = ((g - w).abs().amax(1) / w.abs().max()).nan_to_num(float("inf"))
        if off.max().item() > worst:
            worst = off.max().item()
            first = int((off > tolerance).int().argmax())
            where = f"result {i}, first at row {first} of {len(w)}" if worst > tolerance else ""
    measured(error=worst, tolerance=tolerance)
    if worst > tolerance:
        plan = explain(bound.plan)
        kernels = sorted({f"{s['op']}: {s['chosen']['kernel']}" for s in plan["sites"] if s["chosen"]["rank"]})
        pytest.fail(
            f"logits are wrong by {worst:.3g} of the largest ({where}); tolerance {tolerance:.3g}, {case.dtype}\n"
            f"  KV layouts {', '.join(sorted({x.name for x in bound.plan.layouts.values()}))}\n  bound\n    "
            + "\n    ".join(kernels)
            + "\n  If the cases of these kernels pass, check the data between them.",
            pytrace=False,
        )
