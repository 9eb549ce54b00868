"""Every call that inferplane_dcu makes, bound again to the schemas and call forms in schemas.txt, each with its kind.

Hygon's wheels are on no package index, so nothing here was said by a dispatcher. Run by `make test-vendors` on the
calls that the emulator's runs have noted; nothing is computed.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch

from inferplane_dcu import vendor
from tests.vendors import calls, contract, schemas
from tests.vendors.calls import Call

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
SOURCES = REPOSITORY / "backends" / "dcu" / "inferplane_dcu"
CALLS = REPOSITORY / "build" / "vendors" / "dcu" / "calls"


@pytest.fixture(scope="module")
def restated():
    """The schemas, and operators that have them; the libraries live as long as the module's tests."""
    found = schemas.read(HERE / "schemas.txt")
    libraries = {ns: torch.library.Library(ns, "DEF") for ns in {name.partition("::")[0] for name in found.schemas}}
    for name, schema in found.schemas.items():
        libraries[name.partition("::")[0]].define(str(schema).partition("::")[2])
    yield found
    libraries.clear()


def used() -> set[str]:
    """`namespace::name` of every function that a kernel looks up, in its newest module, and every operator it calls."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (SOURCES / "kernels").glob("*.py")]
    names = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vendor"
    }
    values = [value for name in names for value in flattened(getattr(vendor, name))]
    functions = [value for value in values if isinstance(value, vendor.VendorFunction)]
    return {f"{f.modules[0].replace('.', '__')}::{f.name}" for f in functions} | contract.written(SOURCES)


def flattened(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_every_function_in_the_source_is_restated_and_called(restated):
    assert used() - set(restated.schemas) == set(), "called in the source, not in schemas.txt"
    assert set(restated.schemas) - used() == set(), "in schemas.txt, not called in the source"
    called = {call.name for call in calls.read(CALLS)}
    assert set(restated.schemas) - called == set(), "no run of the emulator has called them"


def test_every_call_binds(restated, capsys):
    report = contract.repeat(calls.read(CALLS), "cpu")
    bound = report.bound + report.shaped  # what returns nothing needs no shape function to be carried out
    by_kind = Counter({kind: 0 for kind in restated.kinds.values()})
    for name, count in bound.items():
        by_kind[restated.kinds[name]] += count
    with capsys.disabled():
        print("", f"Hygon's functions, {restated.version}: {sum(bound.values())} calls bound", sep="\n")
        for kind, count in by_kind.items():
            functions = sum(restated.kinds[name] == kind for name in bound)
            print(f"  {kind}: {count} calls of {functions} functions")
    assert not report.refused, "\n  ".join(["refused:", *report.refused])
    assert not report.misshapen, "\n  ".join(report.misshapen)
    assert set(bound) == set(restated.schemas)


def test_a_wrong_call_is_refused(restated):
    """A keyword that there is not, an argument that is missing, positions where there are keywords only."""
    x = {"tensor": [3, 64], "strides": [64, 1], "dtype": "bfloat16"}
    wrong = [
        Call("lightop__activation::silu_and_mul_opt", [x], {"x": x}, []),
        Call("lightop__norm::rmsnorm_forward_autograd", [x, x, 1e-6], {}, []),
        Call("flash_attn::hg_flash_attn_varlen_func", [x, x, x, x, 1, 1], {}, []),
    ]
    report = contract.repeat(wrong, "cpu")
    assert len(report.refused) == 3 and not report.bound
