"""A plan as data and as text: per site the chosen kernel and the reason, and why every other kernel was rejected."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from inferplane.binding.choice import Choice
from inferplane.binding.lock import signature
from inferplane.binding.plan import Plan
from inferplane.binding.plan_text import plan_lines
from inferplane.ops import Op
from inferplane.types import StepKind

SCHEMA = 2
TEXT_COLUMNS = 100
"""Width of text that is not written to a terminal."""


@dataclass(frozen=True)
class _SiteLine:
    site: str
    op: Op
    choice: Choice
    depth: int


def explain(plan: Plan, model_name: str = "") -> dict[str, Any]:
    """The plan as JSON-ready data, schema 2 (docs/schemas/explain.json).

    Args:
        plan: any plan; nothing needs to be loaded.
        model_name: the model's name for users.

    Returns:
        `{schema, model, device, dtype, arch, assumed, kv_layouts, weight_bytes, sites: [...], copies: [...],
        dequantized: [...], activation_quant_skipped: [...], expanded_bytes, on_torch: [...]}`. Layers that are bound
        alike share one entry, "layers.1-60".
    """
    settings = plan.settings
    sites = []
    for kind in plan.choices:
        for line in _lines(plan, kind):
            c = line.choice
            sites.append(
                {
                    "site": line.site,
                    "op": c.op,
                    "step_kind": kind,
                    "signature": signature(line.op),
                    "chosen": {
                        "kernel": c.label,
                        "provider": c.kernel.provider if c.kernel else "core",
                        "rank": c.rank,
                        "why": c.why,
                        "decided_by": c.decided_by,
                        "hot": c.hot,
                        "ambiguous": c.ambiguous,
                        "weights_dequantized": c.dequantized,
                        "note": c.kernel.note if c.kernel else "",
                        "kv_dtype_unread": c.kv_dtype_unread,
                    },
                    "rejected": [{"kernel": r.kernel, "rank": r.rank, "reason": r.reason} for r in c.rejected],
                }
            )
    return {
        "schema": SCHEMA,
        "model": model_name,
        "device": settings.device,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "arch": settings.arch,
        "assumed": settings.assumed,
        "kv_layouts": [
            {"kind": r.kind, "heads": r.heads, "dim": r.dim, "window": r.window, "layout": x.name}
            for r, x in plan.layouts.items()
        ],
        "weight_bytes": plan.weight_bytes,
        "sites": sites,
        "copies": _copies(plan),
        "dequantized": _list_dequantized(plan),
        "activation_quant_skipped": _activation_quant_skipped(plan),
        "expanded_bytes": plan.expanded_bytes,
        "on_torch": _list_on_torch(plan),
    }


def explain_text(
    plan: Plan, model_name: str = "", *, verbose: bool = False, width: int = TEXT_COLUMNS, **more: Any
) -> str:
    """The plan as text, as the command line shows it.

    Args:
        plan: any plan; nothing needs to be loaded.
        model_name: the model's name for users.
        verbose: also show every rejected kernel with the reason.
        width: columns to which reasons are wrapped.
        more: further entries of the data (`kv_tables`, `kv_scales`, `drafters`, `states`, `decode_steps`).
    """
    data = {**explain(plan, model_name), **more}
    lines = ("".join(text for text, _ in line) for line in plan_lines(data, width, verbose=verbose))
    return "\n".join(line.rstrip() for line in lines)


def _lines(plan: Plan, kind: StepKind) -> list[_SiteLine]:
    """Sites in order; consecutive layers that are bound alike share one line."""
    out: list[_SiteLine] = []

    def walk(op: Op, choice: Choice, site: str, depth: int) -> None:
        out.append(_SiteLine(site, op, choice, depth))
        if not choice.binds_children:
            return
        children = [(path, child, choice.children[path]) for path, child in op.children()]
        i = 0
        while i < len(children):
            path, child, below = children[i]
            j = i
            stem, _, number = path.rpartition(".")
            while number.isdigit() and j + 1 < len(children) and children[j + 1][2] is below:
                if children[j + 1][0].rpartition(".")[0] != stem:
                    break
                j += 1
            name = path if j == i else f"{path}-{children[j][0].rpartition('.')[2]}"
            walk(child, below, f"{site}.{name}" if site else name, depth + 1)
            i = j + 1

    walk(plan.model, plan.choices[kind], "", 0)
    return out


def _copies(plan: Plan) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for i, extra in plan.count_copied_bytes().items():
        packings = tuple(sorted(plan.packings[i]))
        weight = plan.weights[i]
        entry = groups.setdefault(
            packings,
            {
                "weight": weight.parts[0] if weight.parts else "a constant",
                "packings": list(packings),
                "uses": 0,
                "extra_bytes": 0,
                "for": {name: sorted(users)[:4] for name, users in plan.users[i].items()},
            },
        )
        entry["uses"] += 1
        entry["extra_bytes"] += extra
    return list(groups.values())


def _list_dequantized(plan: Plan) -> list[dict[str, Any]]:
    return [{"op": op, "format": f, "weights": len(ids)} for (op, f), ids in sorted(plan.dequantized.items())]


def _list_on_torch(plan: Plan) -> list[dict[str, Any]]:
    """Hot ops that torch's operators run, each with its kernels; "reference" is the op's body."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, _, _, choice in plan.distinct():
        if choice.runs_on_torch:
            found[choice.op].add(choice.label)
    faster = {op: dtype for dtype, ops in plan.faster_dtypes().items() for op in ops}
    return [
        {"op": op, "kernels": sorted(kernels)} | ({"faster_dtype": faster[op]} if op in faster else {})
        for op, kernels in sorted(found.items())
    ]


def _activation_quant_skipped(plan: Plan) -> list[dict[str, Any]]:
    if not plan.model.activation_quants() - {""}:
        return []
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for kind in plan.choices:
        for site, op, choice in plan.sites(kind):
            if choice.activation_quant_skipped:
                formats = ", ".join(sorted(op.activation_quants() - {""}))
                found[choice.op, formats, choice.activation_quant_skipped].add(site)
    return [
        {"op": op, "activation_quant": formats, "sites": len(sites), "reason": reason}
        for (op, formats, reason), sites in sorted(found.items())
    ]
