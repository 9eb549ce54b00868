"""Every operator that inferplane_npu calls, held against torch-npu's own library over stub CANN libraries.

Run by `make test-vendors` in `.venv-npu`, which has torch-npu and no Inferplane: the calls come from a file that the
emulator's run has written. Nothing is computed, no NPU is needed.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch

from tests.vendors import calls, contract, schemas
from tests.vendors.calls import Call

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
KERNELS = REPOSITORY / "backends" / "npu" / "inferplane_npu"
CALLS = REPOSITORY / "build" / "vendors" / "npu" / "calls"

if find_spec("torch_npu") is None:
    pytest.skip("not run: torch-npu is in .venv-npu (make test-vendors)", allow_module_level=True)

torch_npu = import_module("torch_npu")  # one that is there and does not start is a failure, not a reason to skip


@pytest.fixture(scope="module")
def restated():
    return schemas.read(HERE / "schemas.txt")


def test_restated_from_this_version(restated):
    assert torch_npu.__version__.split("+")[0].startswith(restated.version), "restate schemas.txt for this torch-npu"


def test_schemas_are_the_dispatchers(restated):
    found = [
        d for name, schema in restated.schemas.items() for d in schemas.differences(schema, schemas.registered(name))
    ]
    assert not found, "torch-npu's schemas differ from those restated in schemas.txt:\n  " + "\n  ".join(found)


def test_a_changed_schema_is_described_in_words(restated):
    """As if the vendor had renamed an argument, changed a default and added a keyword."""
    name = "npu::npu_quant_matmul"
    text = (
        str(restated.schemas[name])
        .replace("Tensor scale,", "Tensor x2_scale,")
        .replace("y_scale=None", "y_scale=None, bool fast=False")
    )
    text = text.replace("int? output_dtype=None", "int? output_dtype=1")
    found = schemas.differences(torch._C.parse_schema(text), schemas.registered(name))
    assert found == [
        f"{name}: argument 'x2_scale' is gone",
        f"{name}: argument 'fast' is gone",
        f"{name}: argument Tensor scale is new, at place 2",
        f"{name}: argument 'output_dtype' has default None, it had 1",
    ]


def test_every_operator_in_the_source_is_restated_and_called(restated):
    written = {name for name in contract.called_operators(KERNELS) if "npu_" in name}  # `npu` may also be torch.npu
    contract.check_names(restated, written, calls.read(CALLS))


def test_every_call_is_taken(capsys):
    """By the schema, and by the vendor's own shape function where it has one."""
    report = contract.repeat(calls.read(CALLS), "npu")
    with capsys.disabled():
        print("", f"torch-npu {torch_npu.__version__}: " + "\n".join(report.lines()), sep="\n")
    if target := os.environ.get("INFERPLANE_CONTRACT_EVIDENCE"):
        inferplane = re.search(r'^version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]
        versions = {"inferplane": inferplane, "torch": torch.__version__, "torch-npu": torch_npu.__version__}
        contract.write_evidence(Path(target), "npu", report, versions, "python tests/vendors/run.py npu --evidence")
    assert report.shaped, "not one call passed a shape function"
    assert not report.refused, "\n  ".join(["torch-npu refuses:", *report.refused])
    assert not report.misshapen, "\n  ".join(["results on the emulator and of torch-npu differ:", *report.misshapen])


def test_a_wrong_call_is_refused():
    """A keyword that only the vendor's pages have, and a dtype for a tensor."""
    x = {"tensor": [3, 64], "strides": [64, 1], "dtype": "bfloat16"}
    gamma = {"tensor": [64], "strides": [1], "dtype": "bfloat16"}
    wrong = [
        Call("npu::npu_rms_norm", [], {"self": x, "gamma": gamma}, []),
        Call("npu::npu_swiglu", [{"dtype": "bfloat16"}], {}, []),
    ]
    report = contract.repeat(wrong, "npu")
    assert [line.partition(":")[0] for line in report.refused] == ["npu", "npu"]
    assert not report.shaped and not report.bound
    results = [[[3, 64], "bfloat16"], [[3, 1], "bfloat16"]]
    right = contract.repeat([Call("npu::npu_rms_norm", [x, gamma], {"epsilon": 1e-5}, results)], "npu")
    assert right.shaped == {"npu::npu_rms_norm": 1}
    assert right.misshapen == [
        "npu::npu_rms_norm: the emulator gives [[3, 1], 'bfloat16'] instead of [[3, 1], 'float32']"
    ]
