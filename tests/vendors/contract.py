"""Repeating noted calls on a vendor's own library, with fake tensors: nothing is computed, and no device is needed."""

from __future__ import annotations

import ast
import datetime
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, UnsupportedOperatorException

from tests.vendors.calls import Call, decode, results
from tests.vendors.schemas import TORCH, Restated


@dataclass
class Report:
    """What became of the calls.

    Args:
        shaped: operator -> calls that passed the vendor's own shape function.
        bound: operator -> calls whose arguments fit the schema, where the vendor has no shape function.
        refused: a line for each call that the schema or the shape function refused.
        misshapen: a line for each call whose result has another shape or dtype on the emulator.
    """

    shaped: Counter[str] = field(default_factory=Counter)
    bound: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The counts, in words."""
        calls = sum(self.shaped.values()) + sum(self.bound.values()) + len(self.refused)
        return [
            f"{calls} calls of {len({*self.shaped, *self.bound})} operators",
            *(f"  shape function passed: {name} ({n} calls)" for name, n in sorted(self.shaped.items())),
            *(
                f"  bound only, the vendor has no shape function: {name} ({n} calls)"
                for name, n in sorted(self.bound.items())
            ),
            *(f"  REFUSED: {line}" for line in self.refused),
        ]


@contextmanager
def define_operators(restated: Restated) -> Iterator[None]:
    """Within it the dispatcher has operators with a vendor's schemas; torch's own are there anyway."""
    vendor = {name: schema for name, schema in restated.schemas.items() if not name.startswith(f"{TORCH}::")}
    libraries = {ns: torch.library.Library(ns, "DEF") for ns in {name.partition("::")[0] for name in vendor}}
    for name, schema in vendor.items():
        libraries[name.partition("::")[0]].define(str(schema).partition("::")[2])
    yield
    libraries.clear()  # a library's operators live as long as it does


def check_names(restated: Restated, written: set[str], called: Iterable[Call]) -> None:
    """Assert that nothing is called that is not restated, and nothing restated that no run has called.

    Args:
        restated: the vendor's schemas.
        written: `namespace::name` of what the sources call.
        called: the calls that the emulator's runs have noted.
    """
    names = {name.partition(".")[0] for name in restated.schemas}
    assert written - names == set(), "called in the source, not in schemas.txt"
    assert names - written == set(), "in schemas.txt, not called in the source"
    assert set(restated.schemas) - {call.name for call in called} == set(), "no run of the emulator has called them"


def write_evidence(path: Path, device: str, report: Report, versions: dict[str, str], command: str) -> None:
    """The report as dated evidence of level L1 (docs/schemas/evidence.json): a result an operator.

    Args:
        path: the file.
        device: the backend.
        report: what became of the calls.
        versions: of what was held against each other.
        command: how it was run.
    """
    failed = [*report.refused, *report.misshapen]
    results = []
    for name in sorted({*report.shaped, *report.bound, *(line.partition(": ")[0] for line in failed)}):
        own = [line for line in failed if line.startswith(f"{name}: ")]
        how = "passed the vendor's shape function" if report.shaped[name] else "fit the schema; no shape function"
        row: dict[str, Any] = {
            "feature": "contract",
            "case": f"{name}: {report.shaped[name] + report.bound[name]} calls {how}",
            "status": "failed" if own else "passed",
            "error": None,
            "tolerance": None,
        }
        results.append(row | ({"detail": own[0]} if own else {}))
    content = {
        "schema": 1,
        "backend": device,
        "level": "none" if failed else "L1",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "versions": versions,
        "hardware": "none",
        "command": command,
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def repeat(calls: Iterable[Call], device: str) -> Report:
    """Make each call on fake tensors of `device`.

    Args:
        calls: as `calls.read` gives them.
        device: the vendor's device; its library is imported.
    """
    report = Report()
    for call in calls:
        name = call.name
        operator = _operator(name)
        if operator is None:
            report.refused.append(f"{name}: the dispatcher has no such operator")
            continue
        with FakeTensorMode(allow_non_fake_inputs=False):

            def make(shape: list[int], strides: list[int], dtype: torch.dtype) -> torch.Tensor:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)

            try:
                keywords = {k: decode(v, make) for k, v in call.kwargs.items()}
                given = results(operator(*(decode(a, make) for a in call.args), **keywords))
            except (UnsupportedOperatorException, DynamicOutputShapeException):
                report.bound[name] += 1  # raised behind the schema: the arguments were taken
            except NotImplementedError as error:
                if "fake" not in str(error).lower() and "meta" not in str(error).lower():
                    report.refused.append(f"{name}: {error}")
                else:
                    report.bound[name] += 1
            except Exception as error:
                report.refused.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
            else:
                report.shaped[name] += 1
                if wrong := [f"{w} instead of {g}" for w, g in zip(call.results, given) if w is not None and w != g]:
                    report.misshapen.append(f"{name}: the emulator gives {'; '.join(wrong)}")
    return report


def called_operators(*sources: Path) -> set[str]:
    """`namespace::name` of every operator that the sources, files or folders, call.

    Looked for are attributes of names that are `torch.ops.<namespace>`, as `npu` in `npu = torch.ops.npu`, of names
    that stand for a module, as `acme` in `acme = Library("acme_ops")`, and functions of modules that are imported by
    name; `a.b.f` is written `a__b::f`.
    """
    files = [file for path in sources for file in (path.rglob("*.py") if path.is_dir() else [path])]
    texts = [file.read_text(encoding="utf-8") for file in files]
    modules = re.findall(r'^(\w+) = Library\("([\w.]+)"\)$', "\n".join(texts), re.MULTILINE)
    aliases = {name: module.replace(".", "__") for name, module in modules}
    for names, values in re.findall(r"^([\w, ]+) = ((?:torch\.ops\.\w+(?:, )?)+)$", "\n".join(texts), re.MULTILINE):
        spaces = [value.removeprefix("torch.ops.") for value in values.split(", ")]
        aliases.update(zip(names.split(", "), spaces, strict=True))
    attributes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    called = {
        f"{aliases[node.value.id]}::{node.attr}"
        for node in attributes
        if isinstance(node.value, ast.Name) and node.value.id in aliases and node.attr != "KERNELS"
    }
    functions = [found for text in texts for found in re.findall(r'import_module\("([\w.]+)"\)\.(\w+)', text)]
    return called | {f"{module.replace('.', '__')}::{function}" for module, function in functions}


def _operator(name: str) -> Any | None:
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return None if packet is None else getattr(packet, overload or "default", None)
