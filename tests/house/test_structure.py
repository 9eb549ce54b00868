"""The structure of core and backends, held by rules; each rule is proved on a planted fault."""

from __future__ import annotations

import pytest

from tests.house import structure
from tests.house.rules import REPOSITORY, none, plant

CORE = REPOSITORY / "core" / "inferplane"
BACKENDS = sorted(path for path in (REPOSITORY / "backends").glob("*/inferplane_*") if path.is_dir())
CODE = (CORE, *BACKENDS)
ALIKE = ("models/families",)
DEVICE_CODE = ("kernels/triton/", "kernels/hopper/", "kernels/providers/")
ALLOWED_NAMES: dict[str, str] = {}


def test_imports_run_in_no_circle(tmp_path):
    none(structure.import_circles(*CODE))
    folder = plant(tmp_path / "fault", "from fault.b import x\n", "a.py")
    plant(folder, "def later():\n    from fault.a import y\n    return y\n", "b.py")
    plant(folder, "", "__init__.py")
    assert structure.import_circles(folder) == ["imports run in a circle: fault.a, fault.b"]


def test_no_folder_is_crowded(tmp_path):
    none(structure.crowded_folders(CORE, *(path.parent for path in BACKENDS), alike=ALIKE))
    for number in range(21):
        plant(tmp_path, "", f"file{number}.py")
    assert len(structure.crowded_folders(tmp_path)) == 1
    assert structure.crowded_folders(tmp_path, alike=(tmp_path.name,)) == []


def test_no_class_and_no_signature_is_long(tmp_path):
    none(structure.long_classes(*CODE))
    none(structure.long_signatures(*CODE, device_code=DEVICE_CODE))
    plant(tmp_path, "class Long:\n" + "    x = 1\n" * 300)
    assert len(structure.long_classes(tmp_path)) == 1
    plant(tmp_path, f"def f({', '.join(f'a{i}' for i in range(11))}): ...\n")
    assert len(structure.long_signatures(tmp_path)) == 1
    plant(tmp_path, f"def _f({', '.join(f'a{i}' for i in range(11))}): ...\n")
    assert structure.long_signatures(tmp_path) == []


def test_nothing_looks_behind_bound_methods(tmp_path):
    none(structure.looks_behind_methods(*CODE))
    plant(tmp_path, "def f(m):\n    return m.__self__, getattr(m, '__func__', None)\n")
    assert len(structure.looks_behind_methods(tmp_path)) == 2


@pytest.mark.parametrize(
    "fault",
    [
        "def f(y: torch.Tensor):\n    y.secret = 1\n",
        "def f(step: Batch):\n    setattr(step, 'secret', 1)\n",
        "def f(step: Batch):\n    object.__setattr__(step, 'secret', 1)\n",
        "def f():\n    y = torch.empty(3)\n    y.secret = 1\n",
        "def f(y):\n    y.__dict__['secret'] = 1\n",
        "def f(y):\n    y.__dict__.setdefault('secret', 1)\n",
        "def f(view):\n    view.secret = 1\n",
        "def f(logits):\n    logits.__dict__['likely'] = 1\n",
    ],
)
def test_no_attribute_is_hung_on_a_result(fault, tmp_path):
    plant(tmp_path, fault)
    assert len(structure.attributes_on_results(tmp_path)) == 1


def test_results_carry_no_secrets():
    none([f for f in structure.attributes_on_results(*CODE) if "binding/link.py" not in f])


def test_core_compares_no_op_names(tmp_path):
    from inferplane.ops import OPS

    names = frozenset(OPS)
    none(structure.compares_op_names(*(p for p in CORE.iterdir() if p.is_dir() and p.name != "ops"), names=names))
    plant(tmp_path, "def f(op):\n    return op.name in ('rms_norm', 'x')\n")
    assert len(structure.compares_op_names(tmp_path, names=names)) == 1


def test_names_are_words_that_one_would_search_for(tmp_path):
    none(structure.banned_names(*CODE, allowed=ALLOWED_NAMES))
    plant(tmp_path, "class CutRows:\n    room: int = 0\n\n    def is_told(self, whoever): ...\n")
    found = structure.banned_names(tmp_path)
    assert len(found) == 4 and "say capacity" in "".join(found)
    assert structure.banned_names(tmp_path / "none", allowed={"old": "a reason"}) == [
        "old: allowed, and no longer there"
    ]
