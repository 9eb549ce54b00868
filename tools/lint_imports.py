"""Run import-linter on the contracts in pyproject.toml, where `inferplane_*` stands for every backend of the tree.

import-linter knows no such pattern, so the names are filled in first. Arguments are passed on to it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FILLED_IN = Path("build/import-contracts.toml")


def fill_in(contracts: str, packages: list[str]) -> str:
    """The text with one string per package in place of each string that begins with `inferplane_*`."""
    return re.sub(r'"inferplane_\*([^"]*)"', lambda m: ", ".join(f'"{name}{m[1]}"' for name in packages), contracts)


def main(arguments: list[str]) -> int:
    """Fill in the names and run import-linter; returns its exit status."""
    packages = sorted(path.parent.name for path in REPOSITORY.glob("backends/*/inferplane_*/__init__.py"))
    config = REPOSITORY / FILLED_IN
    config.parent.mkdir(exist_ok=True)
    contracts = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    config.write_text(fill_in(contracts, packages), encoding="utf-8")
    paths = [str(REPOSITORY / "core"), *(str(folder) for folder in REPOSITORY.glob("backends/*"))]
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--config", str(FILLED_IN), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
