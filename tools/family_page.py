"""The page docs/family-matrix.md: how each family of models runs on each device, by the plans of a small model."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from inferplane.binding import Choice, Plan, PlanSettings, bind
from inferplane.cli.evidence import Evidence
from inferplane.errors import BindError
from inferplane.models import ARCHITECTURES
from inferplane.models.reading.normalize import SPELLINGS
from inferplane.plugins import PluginHost

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ROOT / "core" / "inferplane" / "models" / "families"
DTYPE = torch.bfloat16
WAYS = ("native", "portable", "torch", "body")
"""How a hot op runs, the best way first; the page shows their first letters."""
LIBRARIES = {"inferplane.kernels.composed": "torch", "inferplane.kernels.triton": "portable"}
"""Packages of core whose kernels are no vendor's."""

INTRO = """# Families by device

For each family of models the lines of its file in `core/inferplane/models/families`, and for each device:

- the lines of the backend's code, Python and C++, that name the family: its architecture, a model type or its file, in
  an identifier or a string, not in comments and docstrings. A family needs kernels of ops, which know no families, so
  each number should be 0;
- how many of the family's hot ops run in which way, from the plan that `explain` shows: **n** by a native kernel, the
  backend's or a vendor's operator; **p** by a portable kernel in Triton; **t** by torch's own operators on the device;
  **b** by the op's body, the slow reference, which `strict=True` refuses. The plans are those of a model with the head
  sizes that vendors' operators know (`tests/vendors/configs.py`), in bfloat16, on the device's first architecture. An
  op counts once, by its worst way in decode and prompt steps;
- the level of proof of the ops that run by a kernel, the lowest of them ([levels](support-matrix.md)); with a star,
  some of them have no evidence yet; "no plan" where the backend cannot run such a model at all.

"""


def page(host: PluginHost, evidence: Mapping[str, list[dict[str, Any]]], configs: Mapping[str, dict[str, Any]]) -> str:
    """The page.

    Args:
        host: the backends.
        evidence: the contents of evidence files by device.
        configs: a config for each architecture, in any order; the first one of each is shown.
    """
    devices = [d.name for d in host.devices()]
    first: dict[str, dict[str, Any]] = {}
    for config in configs.values():
        first.setdefault(config["architectures"][0], config)
    names = {name: find_names(name) for name in ARCHITECTURES}
    code = {device: list(_code_lines(device)) for device in devices}
    rows, references = [], set()
    for name in ARCHITECTURES:
        module = sys.modules[ARCHITECTURES[name].__module__].__name__.rpartition(".")[2]
        cells = [module, str(len((FAMILIES / f"{module}.py").read_text(encoding="utf-8").splitlines()))]
        for device in devices:
            named = sum(bool(names[name].search(line)) for line in code[device])
            try:
                found = find_ways(host, device, first[name])
            except BindError:
                cells.append(f"{named} · no plan")
                continue
            references |= {op for op, way in found.items() if way == "body"}
            level = _lowest_level(Evidence(evidence.get(device, [])), found)
            cells.append(f"{named} · {describe(found)} · {level}")
        rows.append("| " + " | ".join(cells) + " |")
    head = ["| family | lines | " + " | ".join(devices) + " |", "|---|---|" + "---|" * len(devices)]
    left = ", ".join(f"`{op}`" for op in sorted(references)) or "none"
    lines = [INTRO + head[0], head[1], *sorted(rows), "", f"Ops that run by their body somewhere: {left}."]
    return "\n".join(lines) + "\n"


def find_ways(host: PluginHost, device: str, config: dict[str, Any]) -> dict[str, str]:
    """Hot op -> the worst way in which a plan for the device runs it (`WAYS`)."""
    plan = make_plan(host, device, config)
    found: dict[str, str] = {}
    for kind in plan.choices:
        for _, op, choice in plan.sites(kind):
            if choice.hot and (choice.own_hot or not choice.binds_children):
                found[op.name] = max(found.get(op.name, WAYS[0]), way_of(choice), key=WAYS.index)
    return found


def make_plan(host: PluginHost, device: str, config: dict[str, Any], **options: Any) -> Plan:
    """The plan of a model on the features that a device's first architecture is assumed to have."""
    from tests.vendors.configs import model

    backend = host.backend_for_explain(device)
    arch = next(iter(backend.architectures), "")
    features = backend.features(arch or None)
    settings = PlanSettings(backend.name, DTYPE, arch, features, assumed=True)
    return bind(
        model(config),
        host.kernels(backend),
        settings,
        lambda request: [x for x in backend.kv_layouts(request, DTYPE) if x.kv_dtype == "auto"],
        **options,
    )


def describe(found: Mapping[str, str]) -> str:
    """The numbers of ops by way: "5n 1t"."""
    counts = Counter(found.values())
    return " ".join(f"{counts[way]}{way[0]}" for way in WAYS if counts[way])


def way_of(choice: Choice) -> str:
    if choice.kernel is None:
        return "body"
    target = choice.kernel.target
    module = target.partition(":")[0] if isinstance(target, str) else target.__module__
    return next((way for package, way in LIBRARIES.items() if module.startswith(package)), "native")


def _lowest_level(evidence: Evidence, found: Mapping[str, str]) -> str:
    levels = {evidence.level(op) for op, way in found.items() if way != "body"}
    proved = min(levels - {""}, default="none")
    return f"{proved}*" if "" in levels else proved


def find_names(architecture: str) -> re.Pattern[str]:
    """What names a family, where no letter or digit is beside it."""
    module = ARCHITECTURES[architecture].__module__.rpartition(".")[2]
    words = {architecture, module, *SPELLINGS[architecture].model_types}
    return re.compile(rf"(?<![A-Za-z0-9])({'|'.join(sorted(map(re.escape, words)))})(?![A-Za-z0-9])", re.IGNORECASE)


def _code_lines(device: str) -> Iterator[str]:
    """Identifiers and strings of a device's backend, a line of code each; no comment, and no docstring."""
    folder = ROOT / "backends" / device.partition(":")[0]
    for path in sorted(folder.rglob("*.py")):
        if "tests" not in path.parts:
            yield from read_lines(ast.parse(path.read_text(encoding="utf-8")))
    for path in sorted(p for p in (folder / "csrc").rglob("*") if p.suffix in (".h", ".cpp")):
        yield from (line.partition("//")[0] for line in path.read_text(encoding="utf-8").splitlines())


def read_lines(tree: ast.Module) -> Iterator[str]:
    """The identifiers and strings of each line of Python code, without docstrings."""
    lines: dict[int, list[str]] = {}
    documents = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and (id(node) in documents or not isinstance(node.value, str)):
            continue
        words = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        if words:
            lines.setdefault(getattr(node, "lineno", 0), []).extend(words)
    return iter([" ".join(words) for _, words in sorted(lines.items())])
