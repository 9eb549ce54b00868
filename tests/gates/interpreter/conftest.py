"""Kernels are made for the interpreter when their modules are imported, so a process runs these tests or none."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("not run: TRITON_INTERPRET=1 is set by `make test-gates`", allow_module_level=True)

from tests.gates.interpreter.bfloat16 import repair
from tests.gates.interpreter.patches import quicken

repair()
quicken()
