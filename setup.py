"""Lists the packages of core and of every backend folder, and builds the native kernels of the cpu backend.

The kernels are a plain shared library, loaded with ctypes, which links neither Python nor torch. If it cannot be built,
the installation continues without it, and the file `native.txt` beside the backend contains the reason, which
`inferplane doctor` and `inferplane explain` show. Set INFERPLANE_NO_NATIVE=1 to skip it.

What is compiled stays in build/native, under a sum over all that goes into it: a clone's other environments copy it.
"""

import filecmp
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PACKAGE = "inferplane_cpu"
NOTE = "native.txt"
COMPILED = Path("build/native")
FOLDER = "backends/cpu/csrc"
"""Where the sources are; headers are named from here, as "products/linear.h"."""
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
SOURCES = {
    "api.cpp": [],
    "isa_avx2.cpp": AVX2,
    "isa_avx512.cpp": AVX512,
    "isa_avx512_bf16.cpp": BF16,
    "isa_amx.cpp": [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
"""Each source with the flags of its instruction set."""
# OpenMP's symbols stay unresolved: they bind to the library that torch has loaded, so there is one pool of threads.
# The compiler fuses no multiplication and addition by itself: the same roundings on every instruction set.
FLAGS = [
    f"-I{FOLDER}",
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-psabi",
    "-Wno-uninitialized",
    "-Wno-unknown-pragmas",
]


class BuildNative(build_ext):
    """Compiles each source for its own instruction set; without a compiler the installation continues."""

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        note = library.with_name(NOTE)
        for stale in (library, note):
            stale.unlink(missing_ok=True)
        try:
            self._build(library)
        except (OSError, RuntimeError) as error:
            note.write_text(f"{error}\n")
            self.warn(f"the cpu backend's native kernels are left out ({error}); torch's own operators are used")

    def _build(self, library: Path) -> None:
        if os.environ.get("INFERPLANE_NO_NATIVE", "0") not in ("", "0"):
            raise RuntimeError("INFERPLANE_NO_NATIVE was set when Inferplane was installed")
        if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
            raise RuntimeError(
                f"they are written for x86-64 Linux, and this is {platform.machine()} {platform.system()}"
            )
        compiled = COMPILED / f"{_fingerprint()}.so"
        if not compiled.exists():
            self._compile(compiled)
        shutil.copyfile(compiled, library)

    def _compile(self, library: Path) -> None:
        objects = Path(self.build_temp) / PACKAGE
        objects.mkdir(parents=True, exist_ok=True)

        def compile_source(source: str) -> str:
            compiled = str(objects / f"{source}.o")
            _run([*_compiler(), "-c", f"{FOLDER}/{source}", "-o", compiled, *FLAGS, *SOURCES[source]])
            return compiled

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(compile_source, SOURCES))
        library.parent.mkdir(parents=True, exist_ok=True)
        linked = library.with_name(f"{library.name}.{os.getpid()}")
        _run([*_compiler(), "-shared", "-o", str(linked), *compiled])
        for older in library.parent.glob("*.so"):
            older.unlink(missing_ok=True)
        linked.replace(library)

    def copy_extensions_to_source(self) -> None:
        """For editable installs: copy the library, or the reason why there is none, and remove stale ones.

        A library that is there already is left as it is: another environment's processes may be loading it.
        """
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(ext.name))
            folder = Path(self.get_finalized_command("build_py").get_package_dir(PACKAGE))
            for name in (built.name, NOTE):
                made, there = built.with_name(name), folder / name
                if made.exists() and there.exists() and filecmp.cmp(made, there, shallow=False):
                    continue
                there.unlink(missing_ok=True)
                if made.exists():
                    self.copy_file(str(made), str(there))

    def get_outputs(self) -> list[str]:
        """Paths of the library, or of the reason why there is none."""
        libraries = [Path(p) for p in super().get_outputs()]
        return [str(p) for library in libraries for p in (library, library.with_name(NOTE)) if p.exists()]


def _run(command: list[str]) -> str:
    """What a compiler prints; RuntimeError with the first line of its output that mentions an error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"there is no C++ compiler called {command[0]!r}; install one, or name it in CXX") from None
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{command[0]} failed: {next((x for x in lines if 'error' in x), lines[0]).strip()}")
    if done.stderr:
        print(done.stderr)
    return done.stdout


def _compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def _fingerprint() -> str:
    """A sum over the sources, the flags, the compiler and the C library, by which a compiled library is found again."""
    version = _run([*_compiler(), "--version"])
    total = hashlib.sha256(repr((FLAGS, SOURCES, _compiler(), version, platform.libc_ver())).encode())
    for path in sorted(path for path in Path(FOLDER).rglob("*") if path.is_file()):
        total.update(f"{path.as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return total.hexdigest()[:32]


# pyproject.toml could name folders one by one, but no pattern for them.
FOLDERS = [Path("core"), *sorted(path for path in Path("backends").iterdir() if path.is_dir())]
PACKAGES = {name: str(folder) for folder in FOLDERS for name in find_packages(str(folder), include=["inferplane*"])}

setup(
    packages=list(PACKAGES),
    package_dir={name: f"{folder}/{name}" for name, folder in PACKAGES.items() if "." not in name},
    ext_modules=[
        Extension(
            f"{PACKAGE}._native",
            [f"{FOLDER}/{name}" for name in SOURCES],
            depends=[str(p) for p in Path(FOLDER).rglob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
