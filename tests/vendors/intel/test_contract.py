"""The restated schemas, held against those that the vendor's wheel carries.

The wheel cannot be loaded here, but its libraries hold their schemas as strings: those are read by binary.py and
compared, and where the wheel cannot be had its record is. torch's own operators are compared with this torch's
dispatcher.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.vendors import schemas
from tests.vendors.intel.profile import PROFILE
from tests.vendors.schemas import TORCH

RECORDED = json.loads(Path(__file__).with_name("binary.json").read_text(encoding="utf-8"))
IN_THE_BINARY = "string in the vendor's binary"
CACHE_OPERATORS = ("_C_cache_ops", "_C")


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


def test_the_schemas_are_those_of_the_binary(binary, capsys):
    restated = PROFILE.restated
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
    assert RECORDED["attention_keys"] == binary["attention_keys"]
    for library, lines in RECORDED["schemas"].items():
        assert set(lines) <= set(binary["schemas"][library])


def test_attention_is_compiled_for_keys_in_fp8_too():
    """Each kernel, whatever its head size, for queries in bfloat16 and float16."""
    counts = RECORDED["attention_keys"]
    assert counts["float8_e4m3fn"] == counts["same"] > 0
