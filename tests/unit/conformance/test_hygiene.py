"""Each check of declarations, plans and probes finds the fault that it is there for."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.conformance import stepping, xfails
from inferplane.conformance import test_hygiene as suite
from inferplane.conformance import test_ops as ops_suite
from inferplane.conformance.configs import TINY, model
from inferplane.conformance.plugin import STALE
from inferplane.errors import KernelError
from inferplane.kernels.composed import composed_kernels
from inferplane.ops import RMSNorm
from inferplane.types import Kernel, Packing, When
from tests.unit.support.subjects import subject

TURNED = Packing("made.t", lambda w: w.t().contiguous())
LINEAR = Kernel("linear", "made", lambda p, x: x @ p.weight, rank=50, packs={"weight": TURNED})
NORM = Kernel("rms_norm", "made", lambda p, x: x, rank=50)
ATTENTION = Kernel("attention", "made", lambda p, q, batch, kv: q, When(kv_layouts=("paged_16",)), rank=50)


def raising(op):
    raise AttributeError("no such field")


@pytest.mark.parametrize("kernel", [LINEAR, NORM, ATTENTION])
def test_sound_declarations_pass(kernel):
    suite.test_kernel_is_declared_soundly(kernel, subject())


@pytest.mark.parametrize(
    "kernel",
    [
        replace(NORM, op="rms_norms"),
        replace(NORM, target=lambda p, x, y: x),
        replace(NORM, rank=0),
        replace(NORM, rank=900),
        replace(LINEAR, packs={"wieght": TURNED}),
        replace(ATTENTION, when=When(kv_layouts=("paged_17",))),
        replace(NORM, when=When(needs=(("", lambda op: True),))),
        replace(NORM, when=When(needs=(("a field", raising),))),
    ],
)
def test_a_false_declaration_is_found(kernel):
    with pytest.raises((AssertionError, KernelError, pytest.fail.Exception)):
        suite.test_kernel_is_declared_soundly(kernel, subject())


def test_targets_are_imported():
    dotted = replace(NORM, target="inferplane.kernels.composed.basic:rms_norm")
    suite.test_kernel_can_be_imported(dotted, subject())
    for target in ("inferplane.kernels.composed.basic:no_such", "no_such_module:f", "inferplane.plugin:Kernel"):
        with pytest.raises(KernelError):
            suite.test_kernel_can_be_imported(replace(NORM, target=target), subject())


def test_names_are_unique():
    suite.test_kernel_names_are_unique(subject([LINEAR, NORM]))
    with pytest.raises(AssertionError, match="rms_norm/made"):
        suite.test_kernel_names_are_unique(subject([LINEAR, NORM, replace(NORM)]))


@pytest.mark.parametrize(
    "packing",
    [
        Packing("made.t", lambda w: w.t()),  # another stride
        Packing("made.t", lambda w: w),
        Packing("made.t", lambda w: (w.t().contiguous(),)),
        Packing("made.t", lambda w: w.t().contiguous().double()),
        Packing("made.t", lambda w: w.t().contiguous() + torch.rand(1)),
        Packing("made.t", lambda w: w.mul_(2).t().contiguous()),
        Packing("canonical", lambda w: w.t()),
    ],
)
def test_packings_that_differ_are_found(packing):
    suite.test_packings_with_equal_names_are_equal(subject([LINEAR, replace(LINEAR, provider="other")]))
    other = replace(LINEAR, provider="other", packs={"weight": packing})
    with pytest.raises(AssertionError):
        suite.test_packings_with_equal_names_are_equal(subject([LINEAR, other]))


@pytest.mark.parametrize("name", TINY)
def test_plans_are_checked(name):
    dtype, tree = torch.float32, model(TINY[name])
    sound = composed_kernels()
    plan = stepping.plan_for(subject(sound), tree, dtype)
    suite.test_plan_is_not_ambiguous(plan)
    suite.test_plan_explains_itself(plan)
    tied = [*sound, *(replace(k, provider="other") for k in sound if k.op == "linear")]
    with pytest.raises(AssertionError, match="linear: AMBIGUOUS"):
        suite.test_plan_is_not_ambiguous(stepping.plan_for(subject(tied), tree, dtype))


def test_what_explain_says_is_of_its_form():
    odd = [replace(k, note=3) if k.op == "linear" else k for k in composed_kernels()]  # type: ignore[arg-type]
    plan = stepping.plan_for(subject(odd), model(TINY["llama"]), torch.float32)
    with pytest.raises(Exception, match="3 is not of type 'string'"):
        suite.test_plan_explains_itself(plan)


PROBES = """
import os, sys, threading, time
from inferplane.plugin import HOST, Backend, Presence, Probe, hookimpl
INFERPLANE_API = (1, 0)

class Probed(Backend):
    torch_device = HOST
    def open(self): raise NotImplementedError
    def kernels(self): return []

def backend(device, act):
    def probe(cls):
        act()
        return Probe(Presence.AVAILABLE, f"asked at {time.time() if device == 'fickle' else 0}")
    return type(device.title(), (Probed,), {"name": device, "probe": classmethod(probe)})

def noisy():
    os.environ["SET_BY_PROBE"] = "1"
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def heavy():
    import a_vendors_package

def slow():
    time.sleep(0.6)

ACTS = {"fickle": lambda: None, "noisy": noisy, "heavy": heavy, "slow": slow}

@hookimpl
def inferplane_register_backends(register):
    for device, act in ACTS.items():
        register(device, backend(device, act))
"""


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("fickle", "different answers"),
        ("noisy", "environment, threads"),
        ("heavy", "imports a_vendors_package"),
        ("slow", "probing took 0.[67]"),
    ],
)
def test_probes_are_checked(device, words, tmp_path, monkeypatch):
    """A sound probe is that of every device whose suite runs; these are not."""
    (tmp_path / "probes.py").write_text(PROBES)
    (tmp_path / "a_vendors_package.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("INFERPLANE_PLUGINS", "only,probes")
    monkeypatch.setattr(suite, "PROBE_RUNS", 2)  # processes, until one is fast
    with pytest.raises(AssertionError, match=words):
        suite.test_probe_is_cheap_and_harmless(SimpleNamespace(name=device))


def test_stale_xfails_are_found():
    config = SimpleNamespace(stash={STALE: []})
    suite.test_xfails_name_cases(SimpleNamespace(config=config))
    config.stash[STALE] = [xfails.Expected("ops/gone", "why", 3)]
    with pytest.raises(AssertionError, match="line 3: ops/gone"):
        suite.test_xfails_name_cases(SimpleNamespace(config=config))


def test_a_kernel_that_refuses_everything_is_found():
    never = replace(NORM, when=When(needs=(("the moon", lambda op: False),)))
    with pytest.raises(pytest.fail.Exception, match=r"refuses all . samples of op .*, so it cannot") as caught:
        ops_suite.test_some_sample_is_served(never, subject([never]), lambda **facts: None)
    said, samples = str(caught.value), len(RMSNorm.samples())
    assert f"all {samples} samples of op rms_norm" in said and "needs the moon" in said
    ops_suite.test_some_sample_is_served(NORM, subject([NORM]), lambda **facts: None)
    elsewhere = replace(NORM, when=When(features=("bf16", "another-series")))
    with pytest.raises(pytest.skip.Exception, match="refused: feature 'another-series' is unknown"):
        ops_suite.test_some_sample_is_served(elsewhere, subject([elsewhere]), lambda **facts: None)
    both = replace(elsewhere, when=replace(elsewhere.when, needs=never.when.needs))
    with pytest.raises(pytest.fail.Exception, match=r"refuses all . samples of op .*, so it cannot"):
        ops_suite.test_some_sample_is_served(both, subject([both]), lambda **facts: None)


def test_models_find_what_kernels_do_not_show():
    """A kernel that is right on its samples and wrong on other sizes: found only in a whole model."""
    from inferplane.conformance import test_models as models_suite

    def only_samples(p, x):
        y = torch.nn.functional.rms_norm(x, p.weight.shape, p.weight, p.eps)
        return y if x.shape[-1] in (64, 96, 128, 576, 2048) else y * 1.01

    def case(name):
        return models_suite.ModelCase(TINY[name], "float32", "ragged", name)

    kernels = [k for k in composed_kernels() if k.op not in ("rms_norm", "add_rms_norm")]
    kernels.append(replace(NORM, target=only_samples))
    wrong = subject(kernels)
    noted: dict[str, float] = {}
    models_suite.test_tiny_model(case("llama"), wrong, lambda **facts: noted.update(facts))
    assert noted["error"] <= noted["tolerance"]
    with pytest.raises(pytest.fail.Exception, match="logits are wrong"):
        models_suite.test_tiny_model(case("deepseek_v3"), wrong, lambda **facts: noted.update(facts))
    assert noted["error"] > noted["tolerance"]
