"""Builds the cpu backend's native kernels with the address and undefined-behaviour sanitizers, and runs their check.

It needs a C++ compiler with its sanitizers' libraries and only Python's standard library.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
CHECK = "backends/cpu/tests/native_check.cpp"


def setup_constants() -> dict[str, Any]:
    """The constants FOLDER, FLAGS and SOURCES of setup.py by name, and what they are made of; nothing else is run.

    Raises:
        SystemExit: setup.py has one of them no more, or computes it with more than literals and constants.
    """
    constants: dict[str, Any] = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and not any(isinstance(x, ast.Call) for x in ast.walk(node.value)):
            code = compile(ast.Expression(node.value), "setup.py", "eval")
            constants[node.targets[0].id] = eval(code, {}, constants)  # type: ignore[attr-defined]
    missing = [name for name in ("FOLDER", "FLAGS", "SOURCES") if name not in constants]
    if missing:
        raise SystemExit(f"setup.py has no constant {', '.join(missing)}; name its new one in tools/sanitize_native.py")
    return constants


def main() -> int:
    """Build in a temporary folder and run with three threads; returns the check's exit code."""
    setup, compiler = setup_constants(), os.environ.get("CXX", "g++")
    sources = {f"{setup['FOLDER']}/{name}": flags for name, flags in setup["SOURCES"].items()} | {CHECK: []}
    common = [flag for flag in setup["FLAGS"] if not flag.startswith("-O")]
    with tempfile.TemporaryDirectory() as folder:

        def build(item: tuple[str, list[str]]) -> str:
            compiled = f"{folder}/{Path(item[0]).name}.o"
            command = [compiler, "-c", item[0], "-o", compiled, *common, *SANITIZE, *item[1]]
            subprocess.run(command, cwd=ROOT, check=True)
            return compiled

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(build, sources.items()))
        program = f"{folder}/check"
        subprocess.run([compiler, *SANITIZE, "-fopenmp", "-o", program, *objects], check=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
        return subprocess.run([program], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
