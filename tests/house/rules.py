"""The rules of the house as functions: each reads a folder and returns its findings, `file:line: what is wrong`.

They take the folder as an argument so that every rule can be run twice: on this repository, where it must find nothing,
and on a folder with a planted fault, where it must find exactly that. A rule that has never failed is no rule.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
CORE_PACKAGE = REPOSITORY / "core" / "inferplane"
BACKEND_PACKAGES = sorted(path for path in REPOSITORY.glob("backends/*/inferplane_*") if path.is_dir())
SHIPPED = (CORE_PACKAGE, *BACKEND_PACKAGES)
"""The packages that users install."""
DEVICES = tuple(sorted(path.parent.name for path in REPOSITORY.glob("backends/*/backend.json")))
IN_TREE = ",".join(("only", *(f"inferplane_{device}.plugin" for device in DEVICES)))
"""Value of INFERPLANE_PLUGINS that serves the backends of this repository, whatever is installed."""
# What has to be on sys.path when nothing is installed.
SOURCE_PATHS = tuple(str(REPOSITORY / part) for part in ("core", *(f"backends/{device}" for device in DEVICES)))


def python_files(*roots: Path) -> Iterator[Path]:
    for root in roots:
        yield from sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


@functools.lru_cache(maxsize=2048)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def parsed(*roots: Path) -> Iterator[tuple[Path, ast.Module]]:
    """The Python files below `roots` with their syntax trees, which rules share and do not change."""
    for path in python_files(*roots):
        yield path, _tree(path.read_text(encoding="utf-8"))


def finding(path: Path, line: int, what: str) -> str:
    shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    return f"{shown}:{line}: {what}"


def none(findings: list[str]) -> None:
    """Fails, one finding a line."""
    assert not findings, "\n" + "\n".join(findings)


def plant(folder: Path, text: str, name: str = "fault.py") -> Path:
    """Writes a file for a rule to find; returns the folder."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


# ------------------------------------------------------------------ core names no device

_DEVICE_WORDS = "|".join((*(d for d in DEVICES if d != "cpu"), "hip", "rocm", "nccl", "hccl", "xccl", "eccl"))
# Underscores do not join a word here: `is_npu` and `cuda_graph` name a device as well, and so does `CudaGraph`.
_DEVICE_WORD = re.compile(rf"(?<![A-Za-z0-9])(?:{_DEVICE_WORDS})(?![A-Za-z0-9])", re.IGNORECASE)
_DEVICE_CAMEL = re.compile(rf"(?<![A-Z])(?:{'|'.join(map(str.title, _DEVICE_WORDS.split('|')))})(?=[A-Z0-9])")
_CPU_NAMED = re.compile(r"""["']cpu["':]|device[ =]+cpu\b""")
_HOST = re.compile(r"""^HOST(?:: \w+(?:\[\w+\])?)? = "cpu"(?:\s*#.*)?$""")


def device_names(core: Path) -> list[str]:
    """Words that name a device or its collectives, anywhere in core: code, strings, docstrings, comments, examples.

    The one exception is the constant `HOST = "cpu"`, the host's memory, once.
    """
    found, hosts = [], 0
    for path in python_files(core):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = [match.group() for rule in (_DEVICE_WORD, _DEVICE_CAMEL) for match in rule.finditer(line)]
            found += [finding(path, number, f"core names a device: {word!r}") for word in words]
            if _HOST.match(line):
                hosts += 1
                if hosts > 1:
                    found.append(finding(path, number, 'a second HOST = "cpu"; import the first'))
            elif _CPU_NAMED.search(line):
                found.append(finding(path, number, 'core names a device: "cpu"; host memory is the constant HOST'))
    return found


# ------------------------------------------------------------------ names, sizes, grammar

LONGEST_FILE_LINES = 400


def bad_names(*roots: Path) -> list[str]:
    """Files called utils.py and classes called Base*, *Manager or *Impl: names that say nothing of what is inside."""
    found = []
    for path in python_files(*roots):
        if path.name in ("utils.py", "util.py", "helpers.py", "misc.py") or path.parent.name in ("utils", "helpers"):
            found.append(finding(path, 1, "a file is named for what is in it"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and re.search(r"^_?Base(?![a-z])|Manager$|Impl$", node.name):
                found.append(finding(path, node.lineno, f"class {node.name}: say what it is, not that it is one"))
    return found


_CLOCK = re.compile(r"\btime\.time(?:_ns)?\(|\bdatetime\.(?:now|utcnow|today)\(")


def readings_of_the_clock(*roots: Path, allowed: dict[str, str]) -> list[str]:
    """Lines that read the clock that people set, in files that `allowed` (end of path -> reason) does not list: limits
    of time are kept by `time.monotonic`.
    """
    return [
        finding(path, number, "reads the clock that people set: use time.monotonic")
        for path in python_files(*roots)
        if not path.as_posix().endswith(tuple(allowed))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _CLOCK.search(line)
    ]


def long_files(*roots: Path, allowed: dict[str, str]) -> list[str]:
    """Files over 400 lines that `allowed` (path -> reason) does not list, and entries there that no longer apply."""
    found, long = [], set()
    for path in python_files(*roots):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        name = path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else path.name
        if lines > LONGEST_FILE_LINES:
            long.add(name)
            if name not in allowed:
                found.append(finding(path, lines, f"{lines} lines; at most {LONGEST_FILE_LINES} without a reason"))
    found += [f"{name}: allowed to be long, and is not" for name in sorted(set(allowed) - long)]
    return found + [f"{name}: allowed without a reason" for name, reason in allowed.items() if not reason.strip()]


def too_new_grammar(*roots: Path) -> list[str]:
    """Files that Python 3.10 could not parse; some vendors' stacks have nothing newer."""
    found = []
    for path in python_files(*roots):
        try:
            ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
        except SyntaxError as error:
            found.append(finding(path, error.lineno or 1, f"not Python 3.10: {error.msg}"))
    return found


_RUNS_CODE = re.compile(
    r"trust_remote_code\s*=\s*True|\btorch\.load\s*\(|^\s*(?:import|from)\s+(?:pickle|dill|marshal)\b"
)


def runs_foreign_code(*roots: Path) -> list[str]:
    """Ways by which a checkpoint could run code: pickle in any form, or transformers told to trust it."""
    return [
        finding(path, number, f"a checkpoint never runs code: {match.group().strip()}")
        for path in python_files(*roots)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := _RUNS_CODE.search(line))
    ]


def folder_shape(repository: Path) -> list[str]:
    """The plain parents have no `__init__.py`; every backend folder has the names its neighbours have."""
    found = []
    backends = sorted(path for path in (repository / "backends").iterdir() if path.is_dir())
    for parent in (repository / "core", repository / "backends", *backends):
        if (parent / "__init__.py").exists():
            found.append(f"{parent.name}/__init__.py: a plain parent, not a package")
    for backend in backends:
        package = f"inferplane_{backend.name}"
        files = (f"{package}/{name}.py" for name in ("__init__", "plugin", "backend"))
        for name in ("README.md", "backend.json", *files):
            if not (backend / name).exists():
                found.append(f"backends/{backend.name}/{name}: every backend has it, this one does not")
    return found


# ------------------------------------------------------------------ what an import brings with it

VENDOR_PACKAGES = frozenset({"habana_frameworks", "torch_mlu", "torch_musa", "torch_xla"}).union(
    *(json.loads(path.read_text())["vendor_packages"] for path in REPOSITORY.glob("backends/*/backend.json"))
)
"""What each backend's `backend.json` names, and packages of devices that have no backend here."""

_PROBE = """
import importlib, json, os, sys
preload, names = json.loads(sys.argv[1])
for name in preload:
    importlib.import_module(name)
report = {}
for name in names:
    before, environment = set(sys.modules), dict(os.environ)
    try:
        importlib.import_module(name)
        error = None
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    changed = sorted(k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k))
    report[name] = {"new": sorted(set(sys.modules) - before), "environment": changed, "error": error}
print("REPORT " + json.dumps(report))
"""


def imported_by(
    names: list[str], *, preload: tuple[str, ...] = (), paths: tuple[str, ...] = SOURCE_PATHS
) -> dict[str, dict]:
    """Imports `names` in this order in a fresh process and tells what each one brought.

    Returns name -> {"new": modules it added, "environment": variables it changed, "error": why it failed, or None}.
    Modules that an earlier name has brought are not counted again; what `preload` brings is not counted at all.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    environment.pop("INFERPLANE_PLUGINS", None)
    command = [sys.executable, "-c", _PROBE, json.dumps([preload, names])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if not reports:
        raise AssertionError(f"the process that imports {names} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(reports[-1].removeprefix("REPORT "))


def impurities(report: dict[str, dict], forbidden: frozenset[str]) -> list[str]:
    """Findings in a report of `imported_by`: failed imports, changed variables, modules in or below `forbidden`."""
    found = []
    for name, brought in report.items():
        if brought["error"]:
            found.append(f"import {name}: {brought['error']}")
        found += [f"import {name} changes the environment variable {key}" for key in brought["environment"]]
        for module in brought["new"]:
            parts = module.split(".")
            heads = {".".join(parts[: length + 1]) for length in range(len(parts))}
            if heads & forbidden:
                found.append(f"import {name} also imports {module}")
    return found


def core_modules(core: Path, *, without: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of all modules under core, sorted; `without` leaves out these modules and what lies below them."""
    names = []
    for path in python_files(core / "inferplane"):
        parts = path.relative_to(core).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(name == left_out or name.startswith(f"{left_out}.") for left_out in without):
            names.append(name)
    return sorted(names)


# ------------------------------------------------------------------ docstrings that can be worked from

# A shape is names or numbers in brackets, `[tokens, hidden]`; a type, `list[str]`, has a name before its bracket.
_SHAPE = re.compile(r"(?<![\w\]])\[[^\[\]\n]+\]")
_SOURCE = re.compile(r"^\s*Sources?:\s*\S", re.MULTILINE)


def _own_docstring(thing: object) -> str:
    """The docstring written at the thing itself: neither a parent's nor the one that `dataclass` generates."""
    text = thing.__dict__.get("__doc__") if isinstance(thing, type) else getattr(thing, "__doc__", None)
    text = text or ""
    generated = isinstance(thing, type) and text.startswith(f"{thing.__name__}(")
    return "" if generated else text.strip()


def _takes_tensors(function: object) -> bool:
    annotations = getattr(function, "__annotations__", {}).values()
    return any(re.search(r"\bTensor\b", text if isinstance(text, str) else repr(text)) for text in annotations)


def undocumented(name: str, thing: object) -> list[str]:
    """What a promised class or function lacks: docstrings, on methods too, and shapes where tensors go in or out."""
    found = []
    if not _own_docstring(thing):
        return [f"{name}: no docstring"]
    if not isinstance(thing, type):
        if _takes_tensors(thing) and not _SHAPE.search(_own_docstring(thing)):
            found.append(f"{name}: takes or returns tensors, and its docstring gives no [shape]")
        return found
    fields = inspect.get_annotations(thing)  # a field may have a function as its default
    for key, value in vars(thing).items():
        method = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        method = method.fget if isinstance(method, property) else method
        if key.startswith("_") or key in fields or not inspect.isfunction(method):
            continue
        if not (inspect.getdoc(getattr(thing, key, method)) or _own_docstring(method)):
            found.append(f"{name}.{key}: no docstring")
        elif _takes_tensors(method) and not _SHAPE.search(f"{_own_docstring(thing)}\n{_own_docstring(method)}"):
            found.append(f"{name}.{key}: takes or returns tensors, and no docstring gives a [shape]")
    return found


def unexplained_op(name: str, op: type) -> list[str]:
    """What an op's docstring lacks for a kernel's author: shapes of what comes and goes, and the formula's source."""
    text, found = _own_docstring(op), []
    if not text:
        return [f"op {name}: no docstring"]
    if not _SHAPE.search(text):
        found.append(f"op {name}: its docstring gives no [shape]")
    if not _SOURCE.search(text):
        found.append(f'op {name}: its docstring has no line "Source: ..."')
    return found


# ------------------------------------------------------------------ packaging


def requirement_names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def constrained_names(constraints: Path) -> tuple[set[str], list[str]]:
    """Names that the file pins on this interpreter, and findings: lines that pin nothing, addresses, local versions."""
    pinned, found = set(), []
    for number, line in enumerate(constraints.read_text(encoding="utf-8").splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        if line.startswith("-") or "://" in line or "@" in line:
            found.append(f"{constraints.name}:{number}: neither options nor addresses belong here: {line}")
            continue
        requirement = Requirement(line)
        specifiers = list(requirement.specifier)
        if len(specifiers) != 1 or specifiers[0].operator != "==" or "+" in specifiers[0].version:
            found.append(f"{constraints.name}:{number}: pins one public version with ==: {line}")
        if requirement.marker is None or requirement.marker.evaluate():
            pinned.add(canonicalize_name(requirement.name))
    return pinned, found
