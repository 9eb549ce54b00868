"""Stub CANN libraries, generated, so that torch-npu can be imported without CANN: every function answers 0.

    python tests/vendors/npu/stubs.py FOLDER

Only names are taken: the undefined symbols of the installed torch-npu that nothing on this machine defines. A stub that
counted no device would make torch-npu end the process at the first device guard, so it counts one; a real allocation
fails, which is how `open()` tells. Needs gcc, nm and readelf.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])
SYSTEM = ("libstdc++.so.6", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")
LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
RUNTIME = "libascendcl.so"
ONE_DEVICE = "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }"


def main(folder: Path) -> None:
    own = [*(SITE / "torch_npu" / "lib").glob("*.so"), *(SITE / "torch_npu").glob("_C*.so")]
    if not own:
        raise SystemExit(f"torch-npu is not installed in {SITE}")
    needed = {name for so in own for name in re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", so))}
    there = [*(SITE / "torch" / "lib").glob("*.so*"), *map(system_library, sorted(needed & set(SYSTEM)))]
    undefined = {symbol for so in own for symbol in symbols(so, "--undefined-only")}
    defined = {symbol for so in [*own, *there] for symbol in symbols(so, "--defined-only")}
    missing = sorted(s for s in undefined - defined if not s.startswith(("Py", "_Py")))
    libraries = sorted(needed - {path.name for path in [*own, *there]} - set(LOADERS))
    libraries = [name for name in libraries if not name.startswith("libpython")]
    folder.mkdir(parents=True, exist_ok=True)
    plain = [f"long {s}(void) {{ return 0; }}" for s in missing if s != "aclrtGetDeviceCount"]
    (folder / "stubs.c").write_text("\n".join([ONE_DEVICE, *plain]) + "\n")
    compile_library(folder / RUNTIME, folder / "stubs.c")
    (folder / "empty.c").write_text("")
    for name in libraries:
        if name != RUNTIME:
            compile_library(folder / name, folder / "empty.c")
    print(f"{len(missing)} symbols in {len(libraries)} stub libraries: {' '.join(libraries)}")


def run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def system_library(name: str) -> Path:
    return Path(run("gcc", f"-print-file-name={name}").strip())


def symbols(library: Path, which: str) -> set[str]:
    """Names in a library's dynamic table; weak undefined ones may stay undefined."""
    rows = (line.split() for line in run("nm", "-D", which, library).splitlines())
    return {row[-1].split("@")[0] for row in rows if row and not (which == "--undefined-only" and row[-2] in "wv")}


def compile_library(target: Path, source: Path) -> None:
    run("gcc", "-shared", "-fPIC", "-w", "-o", target, source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
