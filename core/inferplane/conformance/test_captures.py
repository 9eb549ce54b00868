"""Compares captured decode steps of whole models with the same steps run eagerly, results and cache.

As when a model is served, each new capture replays random steps first (`capture_check`): other ids, positions, slots,
lengths, block tables and numbers of sequences than those of its capture, padded rows, each step twice. Then steps of
several sizes continue prompts, one capture after the other.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from inferplane.conformance import stepping
from inferplane.conformance.configs import TINY, model
from inferplane.conformance.plugin import SUBJECT
from inferplane.engine.runner.buckets import Buckets
from inferplane.engine.runner.capture import DecodeSteps, why_not_captured
from inferplane.engine.runner.options import DTYPES, RunnerOptions
from inferplane.ops.op import ACCUMULATED, relative_error
from inferplane.types import HOST, Batch
from inferplane.types.batch import Query, make_batch

MAX_TOKENS = 70
SIZES = Buckets(sequences=(1, 2, stepping.SEQUENCES), tokens=(1, 3))
STEPS = ((1,), (1, 1), (1, 1, 1), (3,), (3, 1, 3), (1,), (2, 3))
"""Query tokens of each sequence in the steps that continue prompts."""


def pytest_generate_tests(metafunc):
    dtypes = metafunc.config.stash[SUBJECT].dtypes
    dtype = "bfloat16" if "bfloat16" in dtypes else next(iter(dtypes))
    metafunc.parametrize("case", [(name, dtype) for name in TINY], ids=lambda c: f"capture/{c[0]}/{c[1]}")


def test_captured_steps(case, device, measured):
    """Replays of each captured size give what eager steps give, whatever the batch."""
    name, dtype = case
    tree = model(TINY[name])
    weights = stepping.draw_weights(tree, DTYPES[dtype], steady_routes=True)
    bound = stepping.on_device(device, tree, DTYPES[dtype], weights, MAX_TOKENS)
    if reason := why_not_captured(bound.plan, RunnerOptions()):
        pytest.skip(f"not run: {reason}")

    def eagerly(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return bound.steps["decode"](batch, bound.cache)

    steps = DecodeSteps(device.backend, eagerly, bound.cache, MAX_TOKENS, SIZES, vocab=tree.vocab)
    with torch.inference_mode():
        error = max(_errors(steps, eagerly, bound, tree.vocab), default=0.0)
    if steps.disabled_reason and not steps.buckets:
        pytest.skip(f"not run: {steps.disabled_reason}")
    wrong = [f"{size.sequences} sequences of {size.tokens}: {reason}" for size, reason in steps.wrong.items()]
    assert not steps.disabled_reason, steps.disabled_reason
    assert not wrong, "captures are not what was captured:\n" + "\n".join(wrong)
    tolerance = ACCUMULATED[DTYPES[dtype]]
    measured(error=error, tolerance=tolerance)
    assert error <= tolerance, f"a replay differs from the eager step by {error:.3g}; tolerance {tolerance:.3g}"


def _errors(steps: DecodeSteps, eagerly: Any, bound: stepping.Bound, vocab: int) -> list[float]:
    """How far replays of `STEPS` are from the eager steps, which run after them on the same slots."""
    generator = torch.Generator().manual_seed(1)
    size, found = bound.cache.block_tokens, []
    each = math.ceil(MAX_TOKENS / size)

    def batch_of(counts: tuple[int, ...], befores: tuple[int, ...]) -> Batch:
        queries = []
        for i, (count, before) in enumerate(zip(counts, befores, strict=True)):
            blocks = [each * i + b for b in range(math.ceil((before + count) / size))]
            queries.append(Query(torch.randint(0, vocab, (count,), generator=generator).tolist(), before, blocks))
        return make_batch(queries, block_tokens=size, device=bound.device)

    prompts = batch_of((MAX_TOKENS,) * stepping.SEQUENCES, (0,) * stepping.SEQUENCES)
    bound.steps[prompts.kind](prompts, bound.cache)
    for done, counts in enumerate(STEPS):
        batch = batch_of(counts, tuple(11 * i + 5 * done + 1 for i in range(len(counts))))
        got = [t.to(HOST).float() for t in steps(batch)]
        if steps.disabled_reason:
            break
        want = [t.to(HOST).float() for t in eagerly(batch)]
        found += [relative_error(*pair) for pair in zip(got, want, strict=True)]
    return found
