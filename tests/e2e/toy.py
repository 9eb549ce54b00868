"""The example wheel: built, installed beside this environment's packages, with faults planted in copies of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.house.rules import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "inferplane-toy"
MODULE = "inferplane_toy.py"


def installed() -> bool:
    """Whether this environment has Inferplane installed, editable or not; else it runs from the source tree."""
    names = {
        path.name for name in ("purelib", "platlib") for path in Path(sysconfig.get_path(name)).glob("*.dist-info")
    }
    return any(name.startswith("inferplane-") for name in names)


def copy(folder: Path, *faults: tuple[str, str]) -> Path:
    """The example in `folder`, with each `(what stands there, what replaces it)`."""
    made = Path(shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")))
    source = (made / MODULE).read_text(encoding="utf-8")
    for old, new in faults:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {MODULE}"
        source = source.replace(old, new)
    (made / MODULE).write_text(source, encoding="utf-8")
    return made


def wheel(folder: Path, into: Path) -> Path:
    """Build a wheel of the project in `folder`, without a network: build tools are those of this environment."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(into), str(folder)]
    run(command, dict(os.environ, PYTHONPATH=""))
    (made,) = into.glob("*.whl")
    return made


def environment_with(wheel: Path, folder: Path) -> Path:
    """A new virtual environment that sees this one's packages and has the wheel; returns its python."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], dict(os.environ))
    scheme = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", vars=scheme))
    # addsitedir, not a plain path: this environment may hold an editable install, which is a .pth file itself.
    lines = [
        f"import site; site.addsitedir({path!r})" for path in {sysconfig.get_path(n) for n in ("purelib", "platlib")}
    ]
    (own / "beside.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / Path(sys.executable).name
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--disable-pip-version-check", str(wheel)], dict(os.environ, PYTHONPATH=""))
    return python


def run(command: list[str], env: dict[str, str], cwd: Path | None = None) -> str:
    """What a process prints; an assertion with all it said when it fails."""
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
