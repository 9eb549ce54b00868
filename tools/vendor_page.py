"""The page docs/models-across-vendors.md: one file a family beside another project's forks by vendor, counted alike,
and what each backend replaces in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import family_page
from definition_lines import Definition, Definitions
from model_lines import ImportGraph, count_lines

from inferplane.errors import BindError
from inferplane.models import ARCHITECTURES
from inferplane.models.reading.shipped_configs import PREFIX, list_shipped_configs, read_shipped_config
from inferplane.ops import OPS, Op
from inferplane.plugins import PluginHost
from inferplane.types import Kernel

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "tools" / "peers" / "vllm.json"
FAMILIES = "inferplane.models.families"
NATIVE = {
    "attention/index_select.h": "index_select",
    "model/sparse_mla.h": "sparse_mla_absorbed",
}
"""C++ sources of the cpu backend that only kernels of these ops use -> an op that does."""

INTRO = """# One model file for every vendor

A family of models is one file here, which names no hardware: a tree of [ops](ops.md). A vendor's backend replaces what
it has kernels for, at any level: a product, a whole attention block, a whole layer. {project} {version} keeps folders
by vendor for the newest families instead: each vendor's model file, its attention and its kernels. This page counts
both alike, and shows what each backend here replaces. Any machine shows it, without the device and without weights:

```console
{commands}
```

The figures come from the code of this repository and of {project}'s wheel (commit {commit}).

## Lines

Lines with code: neither blank, nor comments, nor docstrings. Here: the family's file, and what only it imports of the
models' code. There: the modules that {project}'s registry names for the family, and what only they import of
the whole package. Where two families share those, both rows show them, and the sum counts them once.

"""

BESIDE = """
Families are short because their parts are ops, so those must be counted, too. Beside the families' files these are
the parts and ops that no other family uses, and the kernels of these ops, each once for all families above. With them
count the functions, classes and constants that only they need, such as caches in a vendor's form:

| here | files | lines with code |
|---|---|---|
"""

COUNTED = """
{project}'s folders hold more than these families need here: Kimi K3 in that of Kimi Linear, vision, further drafters,
and kernels for products that all models have here (in FP8, for small batches). Its sources in C++ and CUDA are left
out, ours are counted. What else is not comparable is left in, on both sides: the table says how much code a family
costs, not how fast it runs. Speeds are in [benchmarks.md](benchmarks.md), the evidence for each kernel in
[support-matrix.md](support-matrix.md); of the devices below only the cpu was measured.

## What each backend replaces

The plan of a decode step in bfloat16, on each backend's first architecture, with published sizes. *Blocks* are ops
with ops inside, such as attention with its projections: one kernel takes all of it. *Ops* are single. What is left
runs on torch's operators of the device, or by bodies; hot ops that do so are named in the last column, and
`strict=True` refuses them. Kernels in Triton that several backends share are in italics.

"""

REPEAT = """## Count again

```bash
pip download --no-deps vllm=={version}      # then unpack the wheel into a folder
python tools/model_lines.py FOLDER > tools/peers/vllm.json
python tools/generate_docs.py
```
"""


def page(host: PluginHost, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page.

    Args:
        host: the backends.
        configs: small configs of all families, to find which ops only some of them use.
    """
    peer = json.loads(PEER.read_text(encoding="utf-8"))
    shipped = {
        module_of(config["architectures"][0]): (name, config)
        for name in list_shipped_configs()
        if (config := dict(read_shipped_config(PREFIX + name)))["architectures"][0] in ARCHITECTURES
    }
    families = [name for name in peer["families"] if name in shipped]
    devices = [d.name for d in host.devices()]
    commands = (f"$ inferplane explain {PREFIX}{name} --device {device}" for name, device in _commands(shipped))
    parts = [INTRO.format(**peer, commands="\n".join(commands)), _table_of_lines(families, peer), BESIDE]
    parts += [_table_of_shared(host, families, shipped, configs), COUNTED.format(**peer)]
    for family in families:
        name, config = shipped[family]
        parts += [f"### {family}\n\n`{PREFIX}{name}`\n\n", _table_of_plans(host, devices, config), "\n"]
    return "".join([*parts, REPEAT.format(**peer)])


def _commands(shipped: Mapping[str, tuple[str, Any]]) -> Iterable[tuple[str, str]]:
    name = shipped["deepseek_v32"][0]
    return [(name, "npu --arch 910b"), (name, "cuda --arch sm90a --step decode"), (name, "npu --json")]


def module_of(architecture: str) -> str:
    """The name of a family's file."""
    return ARCHITECTURES[architecture].__module__.rpartition(".")[2]


def _table_of_lines(families: Iterable[str], peer: Mapping[str, Any]) -> str:
    graph = ImportGraph(ROOT / "core", "inferplane")
    models = graph.below(FAMILIES) - {FAMILIES}
    project = peer["project"]
    out = [
        f"| family | here | {project} | of these without GPU kernels | vendors' folders there |\n",
        "|---|---|---|---|---|\n",
    ]
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    own = 0
    for family in families:
        mine, there = graph.count(_own(graph, models, [family])).code, peer["families"][family]
        own += mine
        sums[tuple(there["modules"])] = there
        vendors = ", ".join(there["vendors"]) or "none: one file for all"
        out.append(f"| {family} | {mine} | {there['code']:,} | {there['code_beside_kernels']:,} | {vendors} |\n")
    code, beside = (sum(found[key] for found in sums.values()) for key in ("code", "code_beside_kernels"))
    return "".join([*out, f"| all | {own:,} | {code:,} | {beside:,} | |\n"])


def _own(graph: ImportGraph, models: set[str], families: Iterable[str]) -> set[str]:
    """The families' modules, and what only they import of the models' code."""
    roots = {f"{FAMILIES}.{family}" for family in families}
    return {name for name in graph.own(roots, models - roots) if name.startswith("inferplane.models.")}


def _table_of_shared(
    host: PluginHost,
    families: list[str],
    shipped: Mapping[str, tuple[str, Mapping[str, Any]]],
    configs: Mapping[str, Mapping[str, Any]],
) -> str:
    graph = ImportGraph(ROOT / "core", "inferplane")
    models = graph.below(FAMILIES) - {FAMILIES}
    parts = _own(graph, models, families) - {name for f in families for name in _own(graph, models, [f])}
    ops = _own_ops(families, shipped, configs)
    every = [kernel for d in host.devices() for kernel in host.kernels(host.backend_for_explain(d.name))]
    kernels = {_definition_of(kernel): kernel.op in ops for kernel in every}
    defined = Definitions(
        {name: _graph_of(name) for name in {"inferplane", *(m.partition(".")[0] for m, _ in kernels)}}
    )
    classes = {Definition(op.__module__, op.__name__): name in ops for name, op in OPS.items()}
    others = [item for item, is_own in (classes | kernels).items() if not is_own]
    of_ops = defined.own([item for item, is_own in classes.items() if is_own], others)
    of_kernels = defined.own([item for item, is_own in kernels.items() if is_own], others) - of_ops
    rows = [("parts of models", graph.count(parts))]
    names = ", ".join(f"`{name}`" for name in ops)
    rows.append((f"the ops {names}", defined.count(of_ops)))
    by_package: dict[str, list[Definition]] = {}
    for item in of_kernels:
        package = item.module.partition(".")[0].removeprefix("inferplane_")
        by_package.setdefault("all devices" if package == "inferplane" else package, []).append(item)
    rows += [(f"kernels of {name}, Python", defined.count(found)) for name, found in sorted(by_package.items())]
    sources = [ROOT / "backends" / "cpu" / "csrc" / path for path, op in NATIVE.items() if op in ops]
    rows.append(("kernels of cpu, C++", count_lines(sources)))
    return "".join(f"| {what} | {lines.files} | {lines.code:,} |\n" for what, lines in rows)


def _graph_of(package: str) -> ImportGraph:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"no package {package}"
    return ImportGraph(Path(spec.origin).parent.parent, package)


def _definition_of(kernel: Kernel) -> Definition:
    """Of the function that a kernel is, or of the one that makes it."""
    if isinstance(kernel.target, str):
        module, _, name = kernel.target.partition(":")
        return Definition(module, name)
    return Definition(kernel.target.__module__, getattr(kernel.target, "__qualname__", "").partition(".")[0])


def _own_ops(
    families: Iterable[str],
    shipped: Mapping[str, tuple[str, Mapping[str, Any]]],
    configs: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """The ops that the families' models hold and those of no other family do."""
    from tests.vendors.configs import model

    def ops_of(config: Mapping[str, Any]) -> set[str]:
        return {op.name for _, op in model(dict(config)).sites()}

    of_families = {name for family in families for name in ops_of(shipped[family][1])}
    others = (config for config in configs.values() if module_of(config["architectures"][0]) not in shipped)
    return sorted(of_families.difference(*map(ops_of, others)))


def _table_of_plans(host: PluginHost, devices: Iterable[str], config: dict[str, Any]) -> str:
    out = ["| device | blocks | ops | by body |\n|---|---|---|---|\n"]
    for device in devices:
        try:
            plan = family_page.make_plan(host, device, config)
        except BindError as error:
            out.append(f"| {device} | no plan: {error} | | |\n")
            continue
        blocks, ops, bodies = _sort_sites(plan.sites("decode"))
        out.append(f"| {device} | {blocks} | {ops} | {bodies} |\n")
    return "".join(out)


def _sort_sites(sites: Iterable[tuple[str, Op, Any]]) -> tuple[str, str, str]:
    """The names of the ops that kernels of backends take: those with ops inside and single ones; and of hot ops that
    run by their body."""
    found: tuple[dict[str, None], dict[str, None], dict[str, None]] = ({}, {}, {})
    for _, op, choice in sites:
        way = family_page.way_of(choice)
        if way == "body":
            if choice.own_hot:
                found[2][f"`{op.name}`"] = None
        elif way != "torch":
            mark = "*" if way == "portable" else ""
            found[0 if op.children() else 1][f"{mark}`{op.name}`{mark}"] = None
    blocks, ops, bodies = (", ".join(names) for names in found)
    return blocks, ops, bodies
