"""Checks the declarations of a plugin: kernels, packings, plans, the probe. Needs no device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane.binding import explain
from inferplane.binding.resolver import check_declaration, check_parameters
from inferplane.conformance import stepping
from inferplane.conformance.configs import TINY, model
from inferplane.conformance.plugin import STALE, SUBJECT
from inferplane.engine.runner.options import DTYPES
from inferplane.ops import OPS, Draw, Sample
from inferplane.types import Kernel, Packing, QTensor, Weight

PROBE_LIMIT_S = 0.5
"""Of elapsed time, without the time in which the process waited for a core; the fastest of `PROBE_RUNS` runs counts, so
that a busy machine fails no good probe."""
PROBE_RUNS = 3
SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schemas"


def pytest_generate_tests(metafunc):
    subject = metafunc.config.stash[SUBJECT]
    if "kernel" in metafunc.fixturenames:
        which = metafunc.function.__name__.removeprefix("test_kernel_")
        metafunc.parametrize("kernel", subject.kernels, ids=lambda k: f"{k.op}/{k.name}/{which}")
    if "plan" in metafunc.fixturenames:
        which = metafunc.function.__name__.removeprefix("test_plan_")
        ids = [f"{name}/{dtype}" for name in TINY for dtype in subject.dtypes]
        metafunc.parametrize("plan", ids, ids=lambda label: f"plan/{label}/{which}", indirect=True)


@pytest.fixture
def plan(request, subject):
    name, dtype = request.param.split("/")
    return stepping.plan_for(subject, model(TINY[name]), DTYPES[dtype])


def samples_of(kernel: Kernel) -> list[Sample]:
    return list(OPS[kernel.op].samples()) if kernel.op in OPS else []


# -- kernels


def test_kernel_is_declared_soundly(kernel, subject):
    """Op, parameters, rank, packing paths, layout names and predicates are valid."""
    check_declaration(kernel)
    assert 0 < kernel.rank <= 100, f"rank {kernel.rank}: ranks are 1 to 100 (90 tuned, 50 portable, 10 composed)"
    samples = samples_of(kernel)
    paths = {path for sample in samples for path, _ in sample.op.weights()}
    unknown = sorted(set(kernel.packs) - paths) if samples else []
    assert not unknown, f"it packs {unknown}, which no sample of {kernel.op} has; there are {sorted(paths)}"
    available = {
        layout.name
        for sample in samples
        for request in sample.op.kv_requests()
        for dtype in DTYPES.values()
        for layout in subject.layouts(request, dtype)
    }
    strange = sorted(set(kernel.when.kv_layouts) - available) if samples else []
    assert not strange, (
        f"it requires KV layouts {strange}, which do not exist for {kernel.op}; there are {sorted(available)}"
    )
    for words, predicate in kernel.when.needs:
        assert words and not words.endswith("."), f"{words!r} must complete the sentence 'needs ...'"
        for sample in samples:
            try:
                predicate(sample.op)
            except Exception as error:
                pytest.fail(
                    f"the predicate of {words!r} raises on sample {sample.label}: {type(error).__name__}: {error}"
                )


def test_kernel_can_be_imported(kernel, subject):
    """A dotted target names a function with the op's parameters."""
    if not isinstance(kernel.target, str):
        return
    if subject.absent:
        pytest.skip(f"not run: {subject.name} is {subject.absent}")
    check_parameters(kernel)


def test_kernel_names_are_unique(subject):
    """Pins, lock files and xfails identify a kernel by op and name."""
    twice = [f"{op}/{name}" for (op, name), n in Counter((k.op, k.name) for k in subject.kernels).items() if n > 1]
    assert not twice, f"declared twice: {', '.join(twice)}"


def test_packings_with_equal_names_are_equal(subject):
    """All kernels that request a packing by name share one copy, so equal names must mean equal results."""
    users_of: dict[str, list[tuple[str, Packing]]] = {}
    weights: dict[str, list[Weight]] = {}
    for kernel in subject.kernels:
        for path, packing in kernel.packs.items():
            users_of.setdefault(packing.name, []).append((f"{kernel.op}/{kernel.name} at {path}", packing))
            for sample in samples_of(kernel):
                weights.setdefault(packing.name, []).extend(w for p, w in sample.op.weights() if p == path)
    assert "canonical" not in users_of, (
        f"'canonical' is the weight as it was read; {users_of['canonical'][0][0]} must use another name"
    )
    for name, users in users_of.items():
        values = [Draw(0, torch.float32).weight(w) for w in weights.get(name, ())]
        for value in [v for v in values if isinstance(v, torch.Tensor)][:8]:
            before = value.clone()
            packed = [(words, _try_packing(packing, value)) for words, packing in users]
            packed.append((f"{users[0][0]}, packed again", _try_packing(users[0][1], value)))
            assert torch.equal(value, before), f"packing {name!r} of {users[0][0]} changes its input"
            for words, other in packed[1:]:
                same = _equal(packed[0][1], other)
                assert same, f"packing {name!r} of {words} differs from that of {packed[0][0]} on {list(value.shape)}"


def _try_packing(packing: Packing, value: torch.Tensor) -> Any:
    try:
        return packing.fn(value)
    except Exception as error:  # a packing may refuse this sample's weights; packings of one name must then agree
        return type(error).__name__


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
        return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, QTensor) and isinstance(other, QTensor):
        return _equal(one.data, other.data) and _equal(one.scale, other.scale)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (not isinstance(one, (str, int)) or one == other)


# -- plans


def test_plan_is_not_ambiguous(plan):
    """Between two kernels of equal rank only their order could decide, and order does not count."""
    tied = {f"{op.name}: {choice.why}" for _, _, op, choice in plan.distinct() if choice.ambiguous}
    assert not tied, "; ".join(sorted(tied))


def test_plan_explains_itself(plan):
    """The data of explain is JSON that matches its schema, and each rejected kernel has a reason."""
    data = json.loads(json.dumps(explain(plan, "tiny")))
    silent = [(s["site"], r["kernel"]) for s in data["sites"] for r in s["rejected"] if not r["reason"]]
    assert not silent, f"rejected without a reason: {silent}"
    if not SCHEMAS.is_dir():
        return  # an installed package: the schemas are part of the documentation, and core's tests check them
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((SCHEMAS / "explain.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(data)


# -- the probe

_PROBE = """
import json, os, sys, threading, time
import torch
from inferplane.plugins import host

def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    return {"environment": dict(os.environ), "folder": os.getcwd(), "threads": tasks, "path": list(sys.path)}

def now():
    # seconds, without those of waiting for a core where the kernel counts them
    try:
        with open("/proc/self/schedstat") as file:
            return time.perf_counter() - int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return time.perf_counter()

name = sys.argv[1]
h = host()
modules, before, start = set(sys.modules), state(), now()
backend = h.backend_for_explain(name)  # imports its module, probes it, makes it; no other device is probed
taken = now() - start
first, second, after = backend.probe(), backend.probe(), state()
backend.kernels()
tops = {m.partition(".")[0] for m in set(sys.modules) - modules}
expected = set(sys.stdlib_module_names) | {type(backend).__module__.partition(".")[0], "inferplane", "torch"}
print("REPORT " + json.dumps({
    "seconds": taken,
    "same": first == second,
    "changed": [key for key in before if before[key] != after[key]],
    "imported": sorted(top for top in tops - expected if not top.startswith("_")),
}))
"""


def test_probe_is_cheap_and_harmless(subject):
    """The probe reads metadata only: it is fast, repeatable, and leaves no variable, thread or vendor package."""
    seconds: list[float] = []
    while not seconds or (min(seconds) >= PROBE_LIMIT_S and len(seconds) < PROBE_RUNS):
        report = _probe_report(subject.name)
        assert report["same"], "two probes gave different answers"
        assert not report["changed"], f"probing changes the process: {', '.join(report['changed'])}"
        assert not report["imported"], f"probing and listing kernels imports {', '.join(report['imported'])}"
        seconds.append(report["seconds"])
    assert min(seconds) < PROBE_LIMIT_S, (
        f"probing took {min(seconds):.2f} s, the fastest of {len(seconds)} runs, without waiting for a core; "
        f"{PROBE_LIMIT_S} s are allowed"
    )


def _probe_report(device: str) -> dict[str, Any]:
    """What probing a device does to a process of its own."""
    command = [sys.executable, "-c", _PROBE, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert reports, f"the process that probes ended with {done.returncode}:\n{done.stderr[-2000:]}"
    return dict(json.loads(reports[-1].removeprefix("REPORT ")))


# -- the list of expected failures


def test_xfails_name_cases(request):
    """A line that matches no case is left from a case that was renamed or removed."""
    stale = request.config.stash[STALE]
    assert not stale, "these lines match no case: " + "; ".join(f"line {x.line}: {x.pattern}" for x in stale)
