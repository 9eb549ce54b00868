"""Every call that inferplane_xpu.intel makes, bound again to the schemas that the vendor's wheel carries.

The wheel cannot be loaded here, but its libraries hold their schemas as strings: those are read by binary.py and
compared, and where the wheel cannot be had its record is. torch's own operators are compared with this torch's
dispatcher. Run by `make test-vendors` on the calls that the emulator's runs have noted; nothing is computed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.vendors import calls, contract, schemas
from tests.vendors.calls import Call
from tests.vendors.emulator import TORCH

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
SOURCES = REPOSITORY / "backends" / "xpu" / "inferplane_xpu" / "intel"
CALLS = REPOSITORY / "build" / "vendors" / "intel" / "calls"
RECORDED = json.loads((HERE / "binary.json").read_text(encoding="utf-8"))
IN_THE_BINARY = "string in the vendor's binary"
CACHE_OPERATORS = ("_C_cache_ops", "_C")


@pytest.fixture(scope="module")
def restated():
    """The schemas, and operators that have them; the libraries live as long as the module's tests."""
    found = schemas.read(HERE / "schemas.txt")
    vendor = {name: schema for name, schema in found.schemas.items() if not name.startswith(f"{TORCH}::")}
    libraries = {ns: torch.library.Library(ns, "DEF") for ns in {name.partition("::")[0] for name in vendor}}
    for name, schema in vendor.items():
        libraries[name.partition("::")[0]].define(str(schema).partition("::")[2])
    yield found
    libraries.clear()


@pytest.fixture(scope="module")
def binary():
    """What the wheel holds, or None where it could not be had."""
    path = Path(os.environ.get("INFERPLANE_INTEL_BINARY", ""))
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def strings(held: dict, namespace: str) -> dict:
    """Operator -> schema of a namespace's library; the operators of caches lie in the library of the others."""
    library = dict([CACHE_OPERATORS]).get(namespace, namespace)
    parsed = [torch._C.parse_schema(f"{namespace}::{line}") for line in held["schemas"][library]]
    return {schemas.full_name(schema): schema for schema in parsed}


def test_the_schemas_are_those_of_the_binary(restated, binary, capsys):
    held = binary or RECORDED
    against = "read from its wheel" if binary else "as recorded, the wheel could not be had"
    differ, compared = [], Counter()
    for name, schema in restated.schemas.items():
        namespace, kind = name.partition("::")[0], restated.kinds[name]
        if namespace == TORCH:
            differ += schemas.differences(schema, schemas.registered(name))
        elif kind == IN_THE_BINARY:
            differ += schemas.differences(schema, strings(held, namespace).get(name))
        else:
            kind = "compared with nothing: no library of it can be had"
        compared[kind] += 1
    with capsys.disabled():
        print("", f"{held['wheel']}, {against}; torch {torch.__version__}", sep="\n")
        print(*(f"  {kind}: {count} schemas" for kind, count in compared.items()), sep="\n")
    assert compared[IN_THE_BINARY] and not differ, "\n".join(differ)


def test_the_record_is_that_of_the_binary(binary):
    if binary is None:
        pytest.skip("the wheel could not be had")
    assert RECORDED["wheel"] == binary["wheel"]
    assert RECORDED["attention"] == binary["attention"]
    for library, lines in RECORDED["schemas"].items():
        assert set(lines) <= set(binary["schemas"][library])


def test_every_operator_in_the_source_is_restated_and_called(restated):
    written = contract.written(SOURCES)
    assert written - set(restated.schemas) == set(), "called in the source, not in schemas.txt"
    assert set(restated.schemas) - written == set(), "in schemas.txt, not called in the source"
    called = {call.name for call in calls.read(CALLS)}
    assert set(restated.schemas) - called == set(), "no run of the emulator has called them"


def test_every_call_binds(restated, capsys):
    report = contract.repeat(calls.read(CALLS), "cpu")
    bound = report.bound + report.shaped  # what returns nothing needs no shape function to be carried out
    by_kind = Counter({kind: 0 for kind in restated.kinds.values()})
    for name, count in bound.items():
        by_kind[restated.kinds[name]] += count
    with capsys.disabled():
        print("", f"vllm-xpu-kernels {restated.version}: {sum(bound.values())} calls bound", sep="\n")
        for kind, count in by_kind.items():
            operators = sum(restated.kinds[name] == kind for name in bound)
            print(f"  {kind}: {count} calls of {operators} operators")
    assert not report.refused, "\n  ".join(["refused:", *report.refused])
    assert not report.misshapen, "\n  ".join(report.misshapen)
    assert set(bound) == set(restated.schemas)


def test_a_wrong_call_is_refused(restated):
    """A keyword that there is not, and an argument that is missing."""
    x = {"tensor": [3, 64], "strides": [64, 1], "dtype": "bfloat16"}
    wrong = [Call("_C::silu_and_mul", [x], {"x": x}, []), Call("_C::rms_norm", [x, x, x], {}, [])]
    report = contract.repeat(wrong, "cpu")
    assert len(report.refused) == 2 and not report.bound
