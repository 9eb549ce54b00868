"""The machinery that vendors' suites share, on operators of its own."""

from __future__ import annotations

import pytest
import torch

from tests.vendors import calls, schemas
from tests.vendors.emulator import Emulator, Implementations, Meddled, Violation, require

FILE = """# A vendor.
# source: a wheel
# version: 1.2
inferplane_test_vendor::scale(Tensor x, float by=2., *, int? dtype=None) -> Tensor
inferplane_test_vendor::put(Tensor(a!) x, Tensor y) -> ()
"""


@pytest.fixture
def restated(tmp_path):
    path = tmp_path / "schemas.txt"
    path.write_text(FILE)
    return schemas.read(path)


def changed(old: str, new: str) -> list[str]:
    was, now = (torch._C.parse_schema(s) for s in (old, new))
    return schemas.differences(was, now)


def test_a_file_is_read(restated):
    assert (restated.source, restated.version) == ("a wheel", "1.2")
    assert list(restated.schemas) == ["inferplane_test_vendor::scale", "inferplane_test_vendor::put"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE + "not a schema\n", "schemas.txt:6: not a schema"),
        (FILE + FILE.splitlines()[-1] + "\n", "put stands there twice"),
        (FILE.replace("# version: 1.2\n", ""), "does not state its version"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, words):
    path = tmp_path / "schemas.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        schemas.read(path)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("v::f(Tensor x, int n=1, *, str mode='a') -> Tensor", []),
        (
            "v::f(Tensor y, int n=1, *, str mode='a') -> Tensor",
            ["argument 'x' is gone", "argument Tensor y is new, at place 0"],
        ),
        ("v::f(Tensor x, int n=2, *, str mode='a') -> Tensor", ["argument 'n' has default 2, it had 1"]),
        ("v::f(Tensor x, int n, *, str mode='a') -> Tensor", ["argument 'n' has default no default, it had 1"]),
        ("v::f(Tensor x, int n=1, str mode='a') -> Tensor", ["argument 'mode' is no longer a keyword only"]),
        (
            "v::f(Tensor x, float n=1, *, str mode='a') -> Tensor",
            ["argument 'n' is float, it was int", "argument 'n' has default 1.0, it had 1"],
        ),
        (
            "v::f(Tensor(a!) x, int n=1, *, str mode='a') -> Tensor",
            ["argument 'x' is Tensor (written to), it was Tensor"],
        ),
        ("v::f(int n=1, Tensor? x=None, *, str mode='a') -> Tensor", None),
        (
            "v::f(Tensor x, int n=1, *, str mode='a') -> (Tensor, Tensor)",
            ["returns (Tensor, Tensor), it returned (Tensor)"],
        ),
    ],
)
def test_changes_are_reported(new, expected):
    found = changed("v::f(Tensor x, int n=1, *, str mode='a') -> Tensor", new)
    if expected is None:
        assert "v::f: argument 'x' has moved from place 0 to 1" in found
    else:
        assert found == [f"v::f: {line}" for line in expected]


def test_a_schema_that_is_gone():
    was = torch._C.parse_schema("v::f(Tensor x) -> Tensor")
    assert schemas.differences(was, schemas.registered("v::f")) == ["v::f: is gone"]


def test_an_emulator_is_called_through_its_schema(restated, tmp_path):
    emulates = Implementations()

    @emulates("inferplane_test_vendor::scale")
    def scale(x, by, dtype):
        require(x.dim() == 2, f"x has 2 dimensions, got {x.dim()}")
        return (x * by).to(torch.float64 if dtype is None else torch.float16)

    @emulates("inferplane_test_vendor::put")
    def put(x, y):
        x.copy_(y)

    with pytest.raises(ValueError, match="scale"):
        Emulator(restated, {"inferplane_test_vendor::put": put})
    emulator = Emulator(restated, emulates)
    ops = torch.ops.inferplane_test_vendor
    noted = calls.Calls()
    x = torch.ones(3, 2)
    with emulator.listen(noted.note):
        assert ops.scale(x).equal(torch.full((3, 2), 2.0, dtype=torch.float64)), "defaults are the schema's"
        assert ops.scale(x, 3.0, dtype=torch.float16).dtype == torch.float16
        assert ops.scale(x).dtype == torch.float64
        ops.put(x, torch.zeros(3, 2))
    assert not x.any()
    with pytest.raises(Violation, match="2 dimensions, got 1"):
        ops.scale(torch.ones(3))
    with pytest.raises(RuntimeError, match="Unknown keyword argument"):
        ops.scale(x, factor=2.0)
    meddled = Meddled(ops, {"scale": lambda real, x, *args: real(x[:1])})
    assert meddled.scale(x, 5.0).shape == (1, 2)
    noted.write(tmp_path / "calls")
    (next((tmp_path / "calls").iterdir()).rename(tmp_path / "calls" / "another.json"))
    noted.write(tmp_path / "calls")
    again = calls.read(tmp_path / "calls")
    assert [call.name.partition("::")[2] for call in again] == ["scale", "scale", "put"], "each call once"
    assert [call.results for call in again] == [[[[3, 2], "float64"]], [[[3, 2], "float16"]], []]
    assert again[0].args == [{"tensor": [3, 2], "strides": [2, 1], "dtype": "float32"}]
    made = calls.decode(again[1].args, lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
    assert made[0].shape == (3, 2) and made[1] == 3.0
    assert calls.decode(again[1].kwargs["dtype"], torch.empty) in (torch.float16, 5)


def test_dictionaries_and_operators_without_tensors(tmp_path):
    path = tmp_path / "schemas.txt"
    path.write_text(FILE.splitlines()[1] + "\n# version: 1\nvendor_of_dicts::f(int n) -> (Dict(str, int), bool)\n")
    emulator = Emulator(schemas.read(path), {"vendor_of_dicts::f": lambda n: ({"BLOCK": n}, n > 1)})
    noted = calls.Calls()
    with emulator.listen(noted.note):
        assert torch.ops.vendor_of_dicts.f(3) == ({"BLOCK": 3}, True)
    assert next(iter(noted.noted.values())).results == ["dict", "bool"]
    assert calls.decode(calls.encode({"BLOCK": 3, "dtype": torch.int8}), torch.empty) == {
        "BLOCK": 3,
        "dtype": torch.int8,
    }


def test_results_are_described():
    assert calls.results((True, torch.zeros(2, dtype=torch.int8), calls.make_open())) == ["bool", [[2], "int8"], None]
    assert calls.results(None) == []
