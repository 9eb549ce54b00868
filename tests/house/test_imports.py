"""What an import may bring with it, seen from fresh processes."""

from __future__ import annotations

from tests.house import rules
from tests.house.rules import none, plant

# torch brings some of its own device modules; only what comes on top is ours, so torch is loaded first and not counted.
TORCH_DEVICES = frozenset(f"torch.{device}" for device in {*rules.DEVICES, "hip", "mps", "mtia"} - {"cpu"})
LIGHT = (
    rules.VENDOR_PACKAGES
    | TORCH_DEVICES
    | {"transformers", "inferplane.engine", "inferplane.cli", "inferplane.conformance"}
)


def test_plugin_authors_door_is_light():
    none(rules.impurities(rules.imported_by(["inferplane", "inferplane.plugin"], preload=("torch",)), LIGHT))


def test_core_imports_no_vendor_package_and_sets_no_variable():
    # Triton's kernels need triton, the server needs its extra (tests/serving looks at it), and the suite's test modules
    # are for pytest to import. transformers, which core's upper floors may import, looks for triton by itself, so it is
    # loaded first.
    left_out = ("inferplane.kernels.triton", "inferplane.serving", "inferplane.__main__")
    names = rules.core_modules(rules.REPOSITORY / "core", without=left_out)
    names = [name for name in names if not name.rpartition(".")[2].startswith(("test_", "conftest"))]
    none(rules.impurities(rules.imported_by(names, preload=("torch", "transformers", "pytest")), rules.VENDOR_PACKAGES))


def test_backends_are_light():
    names = [f"inferplane_{device}.{module}" for device in rules.DEVICES for module in ("plugin", "backend")]
    none(rules.impurities(rules.imported_by(names, preload=("torch",)), LIGHT))


def test_who_uses_an_engine_elsewhere_imports_no_torch():
    names = [
        "inferplane.engine.clients.process",
        "inferplane.engine.clients.async_llm",
        "inferplane.serving.lifecycle.start",
        "inferplane.cli.verbs.serve",
    ]
    none(
        rules.impurities(
            rules.imported_by(names), rules.VENDOR_PACKAGES | {"torch", "numpy", "transformers", "fastapi"}
        )
    )


def test_planted_faults_are_found(tmp_path):
    plant(tmp_path, "", "torch_npu.py")
    plant(tmp_path, "", "inferplane/__init__.py")
    plant(tmp_path, "", "inferplane/engine/llm.py")
    plant(tmp_path, "import inferplane.engine.clients.llm", "heavy.py")
    plant(tmp_path, "import torch_npu", "vendor.py")
    plant(tmp_path, "import os\nos.environ['SET_BY_IMPORT'] = '1'", "loud.py")
    plant(tmp_path, "raise RuntimeError('no driver')", "broken.py")
    plant(tmp_path, "import json, inferplane", "clean.py")
    names = ["heavy", "vendor", "loud", "broken", "clean"]
    found = "\n".join(rules.impurities(rules.imported_by(names, paths=(str(tmp_path),)), LIGHT))
    for name in names[:-1]:
        assert f"import {name}" in found
    assert "import clean" not in found
    assert "RuntimeError: no driver" in found
