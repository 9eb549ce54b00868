"""A plan as text for people: the tree of sites, what runs each, and why. `LLM.explain_text` and the command line both
use it; the command line adds colour.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferplane.binding.choice import DECOMPOSITION
from inferplane.ops import OPS
from inferplane.types import PLAIN, RANK_PORTABLE, RANK_TUNED

GAP = "  "
NARROWEST_WHY = 16
INDENT = 2
MIB = 2**20
Line = list[tuple[str, str]]
"""Pieces of a line of text, each with its style: "", "dim", "bold", "green", "cyan", "yellow", "bold red"."""


@dataclass(frozen=True)
class SiteRow:
    """One site of a plan: its last name, its depth in the tree, and its entry in the plan's data."""

    label: str
    depth: int
    entry: dict[str, Any]

    def content(self, *, verbose: bool) -> tuple[Any, ...]:
        """Equal for rows that read the same for two step kinds; with `verbose`, their rejected kernels too."""
        e = self.entry
        return self.label, self.depth, e["op"], str(e["chosen"]), str(e["rejected"]) if verbose else ""

    @property
    def needs_attention(self) -> bool:
        """A hot op without a kernel, or without one that reads the KV cache's dtype, or kernels of equal rank."""
        chosen = self.entry["chosen"]
        if chosen["ambiguous"] or chosen["kv_dtype_unread"]:
            return True
        return bool(OPS[self.entry["op"]].hot and chosen["provider"] == "core")


def plan_lines(
    data: Mapping[str, Any], width: int, *, verbose: bool = False, architectures: Sequence[str] = ()
) -> Iterator[Line]:
    """The lines of a whole plan.

    Args:
        data: the result of `explain`; with `kv_tables`, `drafters`, `states` and `decode_steps`, what windows release,
            what drafts, what recurrent layers keep and which steps are captured are shown too.
        width: columns to which reasons are wrapped.
        verbose: also show rejected kernels.
        architectures: those the backend knows, shown if the plan assumes one.
    """
    yield from _head(data, architectures)
    kinds = list(dict.fromkeys(site["step_kind"] for site in data["sites"]))
    columns = {kind: list(site_rows([site for site in data["sites"] if site["step_kind"] == kind])) for kind in kinds}
    shown: dict[str, list[SiteRow]] = {}
    for kind in kinds:
        words = [x.content(verbose=verbose) for x in columns[kind]]
        same = next((k for k, r in shown.items() if [x.content(verbose=verbose) for x in r] == words), None)
        if same is None:
            shown[kind] = columns[kind]
        else:
            shown[f"{same}, {kind}"] = shown.pop(same)
    for kind, lines in shown.items():
        yield from ([("", "")], [(f"steps: {kind}", "bold")], *_table(lines, width, verbose=verbose))
    yield [("", "")]
    yield from _foot(data, [row for lines in shown.values() for row in lines])


def site_rows(sites: list[dict[str, Any]]) -> Iterator[SiteRow]:
    """Sites of one step kind, parents before children, with their depth in the tree."""
    parents: list[str] = []
    for entry in sites:
        site = entry["site"]
        while parents and not (parents[-1] == "" or site.startswith(f"{parents[-1]}.")):
            parents.pop()
        parent = parents[-1] if parents else ""
        label = site[len(parent) + 1 :] if parent else site
        if label[:1].isdigit():
            label = f"{parent.rpartition('.')[2]}.{label}"
        yield SiteRow(label or "model", len(parents), entry)
        parents.append(site)


def _head(data: Mapping[str, Any], architectures: Sequence[str]) -> Iterator[Line]:
    where = f", planned for {data['arch']}" if data["arch"] else ", planned"
    if data["assumed"]:
        others = [name for name in architectures if name != data["arch"]]
        where += f" (assumed{'; --arch also accepts ' if others else ''}{', '.join(others)})"
    else:
        where = f", bound on {data['device']}{', ' if data['arch'] else ''}{data['arch']}"
    layouts = ", ".join(sorted({layout["layout"] for layout in data["kv_layouts"]}))
    cache = f"KV layout {layouts}{_windows(data)}" if layouts else "no KV cache"
    yield [(data["model"] or "model", "bold"), (f" in {data['dtype']}{where}", "")]
    yield [(f"weights {_in_words(data['weight_bytes'])}, {cache}", "")]
    if scales := data.get("kv_scales"):
        yield [(f"KV cache: {scales['note']}", "")]
    for drafter in data.get("drafters", ()):
        yield [(_format_drafter(drafter), "")]
    if states := data.get("states"):
        words = f"{states['layers']} recurrent layer(s) keep {states['sequence_bytes'] / MIB:,.1f} MiB of each sequence"
        yield [(f"{words}; refused drafts cost a step", "")]


def _format_drafter(data: Mapping[str, Any]) -> str:
    """What drafts, as a line; `data` is an entry of `drafters`."""
    quantized = f" in {data['quantization']}" if data["quantization"] else ""
    size = f"{data['weight_bytes'] / MIB:,.1f} MiB of weights, {data['kv_block_bytes']:,} bytes a KV block"
    whose = [f"{what} {'of its own' if data[what] == 'own' else 'of the model'}" for what in ("embedding", "head")]
    return f"drafts: {data['method']} from {data['model']}{quantized}, {size}; {', '.join(whose)}"


def _windows(data: Mapping[str, Any]) -> str:
    """Which tokens the cache keeps if layers attend to a window, or that it keeps index keys too."""
    windows = {layout["window"] for layout in data["kv_layouts"]}
    found = data.get("kv_tables", {"tables": [], "shared_because": ""})
    keys = f"; {found['index_keys']} layers also keep index keys" if "index_keys" in found else ""
    if windows <= {None}:
        return keys
    layers: Counter[int | None] = Counter()
    for table in found["tables"]:
        layers[table["window"]] += table["layers"]
    released = sorted(window for window in layers if window is not None)
    if released and len(layers) == 1:
        return f"; blocks before the last {released[0]} tokens are released" + keys
    if released:
        parts = (f"the last {window} tokens of {layers[window]} layers" for window in released)
        return f"; blocks before {' and before '.join(parts)} are released" + keys
    if not found["shared_because"]:
        return keys
    some = ", ".join(map(str, sorted(windows - {None})))
    return f"; layers with a window of {some} keep all tokens too, because {found['shared_because']}" + keys


def _table(lines: list[SiteRow], width: int, *, verbose: bool) -> Iterator[Line]:
    labels = [" " * INDENT * row.depth + row.label for row in lines]
    columns = [labels, [row.entry["op"] for row in lines], [_by(row) for row in lines]]
    heads = ("site", "op", "run by")
    widths = [max(map(len, (head, *cells))) for head, cells in zip(heads, columns)]
    start = 2 + sum(widths) + len(GAP) * len(widths)
    why_width = max(NARROWEST_WHY, width - start)
    yield [("  " + GAP.join(f"{head:<{w}}" for head, w in zip((*heads, "why"), (*widths, 0))), "dim")]
    for row, *cells in zip(lines, *columns):
        label, op, by = (f"{cell:<{w}}" for cell, w in zip(cells, widths))
        why = textwrap.wrap(_why(row), why_width) or [""]
        mark = ("! ", "bold red") if row.needs_attention else ("  ", "")
        why_style = "bold red" if row.needs_attention else "dim"
        yield [mark, (label + GAP, ""), (op + GAP, "dim"), (by, _style(row)), (GAP, ""), (why[0], why_style)]
        for more in why[1:]:
            yield [(" " * start + more, why_style)]
        if verbose:
            pad = " " * (4 + INDENT * (row.depth + 1))
            for loser in row.entry["rejected"]:
                words = f"not {loser['kernel']} (rank {loser['rank']}): {loser['reason']}"
                yield from (
                    [(x, "yellow")]
                    for x in textwrap.wrap(words, width, initial_indent=pad, subsequent_indent=f"{pad}  ")
                )


def _why(row: SiteRow) -> str:
    """The reason; empty for an op that has no kernel on any device."""
    chosen = row.entry["chosen"]
    silent = chosen["kernel"] == DECOMPOSITION and chosen["decided_by"] == "rank" and not row.entry["rejected"]
    return "" if silent and not row.needs_attention else str(chosen["why"])


def _by(row: SiteRow) -> str:
    kernel = str(row.entry["chosen"]["kernel"])
    return kernel.replace(DECOMPOSITION, "its parts")


def _style(row: SiteRow) -> str:
    chosen = row.entry["chosen"]
    if row.needs_attention:
        return "bold red"
    if chosen["provider"] == "core":
        return "dim"
    return "green" if chosen["rank"] >= RANK_TUNED else "cyan" if chosen["rank"] >= RANK_PORTABLE else ""


def _foot(data: Mapping[str, Any], lines: list[SiteRow]) -> Iterator[Line]:
    for copy in data["copies"]:
        packings = f"{len(copy['packings'])} packings ({', '.join(copy['packings'])})"
        weights = f"{copy['uses']} weights" if copy["uses"] > 1 else "1 weight"
        more = f"{weights} such as {copy['weight']}, {copy['extra_bytes']} bytes more"
        yield [(f"stored in {packings}: {more}", "")]
    for item in data.get("quantized", ()):
        to = "not quantized" if item["format"] == PLAIN else f"quantized to {item['format']} while read"
        words = f"{item['weights']} weights of {item['op']} {to}"
        yield [(f"{words}: {item['why']}", "")]
    for item in data["dequantized"]:
        words = f"dequantized at load: {item['weights']} weights of format {item['format']}"
        yield [(f"{words}, which no kernel of {item['op']} accepts here", "")]
    for item in data["activation_quant_skipped"]:
        words = f"activations not quantized to {item['activation_quant']} at {item['sites']} sites"
        yield [(f"{words}, though that is requested: {item['reason']}", "")]
    steps = data.get("decode_steps")
    if steps is not None and not steps["off"]:
        yield [(format_captured_steps(steps), "")]
    marked: dict[str, set[str]] = {"slow": set(), "tied": set(), "unread": set()}
    for row in lines:
        chosen = row.entry["chosen"]
        if row.needs_attention:
            why = "tied" if chosen["ambiguous"] else "unread" if chosen["kv_dtype_unread"] else "slow"
            marked[why].add(row.entry["op"])
    slow, tied, unread = (marked[why] for why in ("slow", "tied", "unread"))
    if slow:
        yield [(f"hot ops on their slow reference: {', '.join(sorted(slow))}; verbose shows why", "bold red")]
    if unread:
        yield [(f"hot ops on torch because of the KV cache's dtype: {', '.join(sorted(unread))}", "bold red")]
    if tied:
        yield [(f"kernels of equal rank: {', '.join(sorted(tied))}; pin one", "bold red")]
    if not slow and not tied and not unread:
        yield [("every hot op has a kernel", "green")]
    yield [(f"weights expanded at load: {_in_words(data['expanded_bytes'])}", "")]
    names = ", ".join(f"{item['op']} ({', '.join(item['kernels'])})" for item in data["on_torch"])
    yield [(f"hot ops on torch's own operators: {names or 'none'}", "")]
    for dtype in sorted({item.get("faster_dtype", "") for item in data["on_torch"]} - {""}):
        ops = ", ".join(item["op"] for item in data["on_torch"] if item.get("faster_dtype") == dtype)
        yield [(f"faster with --dtype {dtype}, in which the device has kernels: {ops}", "bold red")]


def _in_words(nbytes: int) -> str:
    """Bytes in words; "none" for 0."""
    size = nbytes / MIB
    return "none" if not nbytes else f"{size:,.1f} MiB" if size < 10 * 1024 else f"{size / 1024:,.1f} GiB"


def format_captured_steps(data: Mapping[str, Any]) -> str:
    """Which decode steps are captured, as a sentence; `data` is `decode_steps`."""
    if data["off"]:
        return f"decode steps are not captured: {data['off']}"
    tokens = f", {' or '.join(map(str, data['tokens']))} tokens each" if len(data["tokens"]) > 1 else ""
    drafts, apart = "", data.get("drafting_layer")
    if apart is not None:
        drafts = "; drafts are " + (f"captured separately: {apart}" if apart else "captured in the same graph")
    wrong = "".join(
        f"; those of {w['sequences']} with {w['tokens']} tokens each replay wrongly and run eagerly: {w['reason']}"
        for w in data.get("wrong", ())
    )
    return (
        f"decode steps are captured for {', '.join(map(str, data['sequences']))} sequences{tokens}: padding costs at "
        f"most {data['padding']:.0%} of a step, inputs and results take {data['nbytes'] / 2**20:.1f} MiB{drafts}{wrong}"
    )
