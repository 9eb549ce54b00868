"""Names of providers and kernels that have changed since 0.1: pins and lock files may use the old ones, and warn."""

from __future__ import annotations

import warnings

import pytest

from inferplane.binding import signature, write_lock
from inferplane.binding.old_names import current_kernel_names
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.errors import BindError
from inferplane.plugins import host
from tests.unit.support.small import kernel

KERNELS = [
    kernel("linear", "torch_batch_invariant"),
    kernel("linear", "native", target="m:linear_batch_invariant"),
    kernel("lm_head", "native", target="m:lm_head"),
    kernel("linear", "acme_fixed"),
    kernel("linear", "acme_batch_invariant"),
]


@pytest.mark.parametrize(
    ("name", "current"),
    [
        ("torch_fixed", "torch_batch_invariant"),
        ("torch_fixed:linear", "torch_batch_invariant:linear"),
        ("native:linear_fixed", "native:linear_batch_invariant"),
        ("native:lm_head", "native:lm_head"),
        ("acme_fixed", "acme_fixed"),
        ("acme_fixed:linear", "acme_fixed:linear"),
        ("native:lm_head_fixed", "native:lm_head_fixed"),
        ("other_fixed", "other_fixed"),
        ("reference", "reference"),
    ],
)
def test_a_name_is_replaced_if_a_kernel_has_the_new_one_alone(name, current):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert current_kernel_names({"linear": name}, KERNELS) == {"linear": current}
    assert [str(w.message) for w in caught if w.category is DeprecationWarning] == (
        [] if name == current else [f"{name} is deprecated; use {current} (removed in 0.3)."]
    )


def planned(**options):
    return Runner.plan_only(ModelFiles("demo"), host(), "cpu", RunnerOptions(dtype="float32", **options))


def label(runner, op, kind="decode"):
    return next(choice.label for _, found, choice in runner.plan.sites(kind) if found.name == op)


@pytest.mark.parametrize("op", ["linear", "lm_head", "moe_experts"])
def test_a_pin_may_name_an_old_provider(op):
    with pytest.warns(DeprecationWarning, match="torch_fixed is deprecated; use torch_batch_invariant"):
        runner = planned(ops={op: "torch_fixed"}, deterministic=True)
    assert label(runner, op) == f"torch_batch_invariant:{op}"


def test_an_unknown_provider_stays_an_error():
    with pytest.raises(BindError, match="pinned to 'torch_fast'"):
        planned(ops={"linear": "torch_fast"})


def test_a_lock_file_may_name_old_kernels(tmp_path):
    plain = planned(deterministic=True)
    sites = {op.name: op for _, op, _ in plain.plan.sites("decode") if op.name in ("linear", "lm_head")}
    path = tmp_path / "old.lock"
    choices = {f"{name}|decode|{signature(op)}": f"torch_fixed:{name}" for name, op in sites.items()}
    write_lock(path, plain.fingerprint(), choices)
    with pytest.warns(DeprecationWarning, match="torch_fixed:linear is deprecated; use torch_batch_invariant:linear"):
        locked = planned(deterministic=True, lock=str(path))
    chosen = {op.key(): choice for _, op, choice in locked.plan.sites("decode")}
    for name, op in sites.items():
        assert chosen[op.key()].label == f"torch_batch_invariant:{name}"
        assert chosen[op.key()].why == "chosen by the lock file"
