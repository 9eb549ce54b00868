"""Show where in a network an error arises: site by site, the error that arrives and the error that is introduced.

MODEL and a reference, MODEL2, run over the same windows of texts. A site is an op of the network, such as the product
of some weights, a norm, attention with its cache as a whole, or a layer. An error is the rms of a difference over the
rms of the reference's values. At each site one arrives with the input, and one is introduced: that of the result when
MODEL's site is called with the reference's input. A site with an arrived error alone only passes it on. The first
site that introduces more than a threshold is the first to diverge.

The reference is MODEL itself if --against is left out; it runs as the options --against-... say, and without MODEL's
formats and pins. Where a kernel runs several products in one call, the call is the site, unless --parts divides it.
By token: the rms over tokens of each one's relative error, so that a token with large values does not hide the others.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import (
    Parser,
    add_device,
    add_examples,
    add_json,
    add_model,
    add_option,
    check_device,
    pins,
)
from inferplane.cli.model_loading import load_model
from inferplane.cli.screen import Screen
from inferplane.cli.text_windows import TextWindows, add_texts
from inferplane.errors import InferplaneError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from inferplane.audit import SiteAudit, SiteErrors
    from inferplane.audit.sitewise import Role
    from inferplane.engine import LLM

SCHEMA = 1
WINDOWS = 8
MOST_ROWS = 10
ROLES: Mapping[Role, str] = {
    "introduces": "introduce an error",
    "contains": "contain such a site",
    "passes on": "pass one on",
    "agrees": "agree",
}
OF_EACH = ("device", "dtype", "quantization", "kv_cache_dtype")
OF_MODEL = ("index_key_dtype", "head_format")
"""Options that the reference has too, as `--against-...`."""


def add_arguments(parser: Parser) -> None:
    """Options of `audit`."""
    parser.usage = f"{parser.prog} [MODEL] --data PATH ... [options]"
    add_model(parser)
    words = "a reference of the same structure and vocabulary; left out: MODEL itself"
    parser.add_argument("--against", metavar="MODEL2", help=words)
    add_texts(parser, windows=WINDOWS, seed="of which windows are drawn")
    words = "introduced error above which a site diverges; left out: the tolerance that kernels of its op are held to"
    words += " in the less precise of both dtypes (float32: 2e-06 to 2e-05, bfloat16: 0.008 to 0.03)"
    parser.add_argument("--threshold", metavar="E", type=float, help=words)
    words = (
        "divide what a larger kernel runs in one call into its parts, each with a kernel of its own; left out: where"
    )
    words += " both run on one device with the same pins, so that weights differ and not kernels"
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=None, help=words)
    words = "list the sites whose path or modules match, such as 'layers.3.*'; repeatable"
    parser.add_argument("--sites", metavar="PATTERN", action="append", default=[], help=words)
    add_json(parser)
    group = parser.add_argument_group("where and how MODEL runs")
    add_device(group)
    for name in ("dtype", "kv_cache_dtype", "index_key_dtype", "quantization", "head_format"):
        add_option(group, name)
    words = "pin a site or op to a provider, a variant, reference or decomposition; repeatable"
    group.add_argument("--op", metavar="WHAT=PROVIDER", action="append", default=[], dest="ops", help=words)
    add_option(group, "strict")
    group = parser.add_argument_group("where and how the reference runs")
    group.add_argument("--against-device", metavar="X", help="left out: that of --device")
    group.add_argument("--against-dtype", metavar="T", help="left out: that of --dtype")
    group.add_argument("--against-quantization", metavar="Q", help="left out: the formats of its files")
    group.add_argument("--against-kv-cache-dtype", metavar="T", help="left out: auto")
    words = "a pin of the reference, as --op; repeatable"
    group.add_argument("--against-op", metavar="WHAT=PROVIDER", action="append", default=[], help=words)
    add_examples(
        parser,
        "org/m --quantization weight_only_int4 --data texts",
        "copy --against org/m --data texts --html report.html",
        "org/m --against-op causal_lm=reference --data texts",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Load both, run over the windows, print."""
    from inferplane.audit import audit_sites
    from inferplane.audit.sites_page import write_sites_page

    threshold: float | None = args.threshold
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise UsageError(f"--threshold {threshold}.", there_is="numbers of 0 and more")
    check_device(args.against_device, indexed=False, name="--against-device")
    texts = TextWindows.of(args)
    shared = {"strict": args.strict, "max_num_seqs": 1}
    shared |= {"max_model_len": texts.tokens, "max_num_batched_tokens": texts.tokens}
    own = {**shared, **{name: getattr(args, name) for name in (*OF_EACH, *OF_MODEL)}, "ops": pins(args.ops)}
    given = {name: getattr(args, f"against_{name}") for name in OF_EACH}
    given = {name: value for name, value in given.items() if value is not None}
    other = {
        **shared,
        "device": args.device,
        "dtype": args.dtype,
        **given,
        "ops": pins(args.against_op, "--against-op"),
    }
    against = args.model if args.against is None else args.against
    is_same_plan = (own["device"], own["ops"]) == (other["device"], other["ops"])
    parts = is_same_plan if args.parts is None else args.parts
    with ExitStack() as opened:
        model = opened.enter_context(_load(args.model, own, screen, parts=parts))
        with _name_options_of_reference(given):
            reference = opened.enter_context(_load(against, other, screen, parts=parts))
        windows = texts.draw(model.tokenizer)
        with screen.progress_counter("auditing", len(windows)) as count:
            found = audit_sites(model, reference, windows, threshold, count)
        devices = model.device, reference.device
    settings = [
        *_list_settings("model", {**own, "device": devices[0]}),
        *_list_settings("reference", {**other, "device": devices[1]}),
        ("windows", f"{found.windows} of {texts.tokens} tokens, seed {texts.seed}"),
        ("threshold", "of each op" if threshold is None else str(threshold)),
    ]
    if texts.page is not None:
        texts.write_page(write_sites_page(found, args.model, against, settings))
    if args.json:
        screen.facts({"schema": SCHEMA, "model": args.model, "against": against, **found.data()})
        return 0
    _show(found, args.sites, screen)
    return 0


def _load(model: str, options: dict[str, Any], screen: Screen, *, parts: bool) -> LLM:
    """Load a model, its larger kernels divided if so requested."""
    if parts:
        from inferplane.audit import find_part_pins
        from inferplane.engine import ModelFiles, Runner, RunnerOptions
        from inferplane.plugins import host

        names = ("dtype", "quantization", "kv_cache_dtype", *OF_MODEL, "max_model_len")
        planned = RunnerOptions(**{name: options[name] for name in names if name in options})
        tree = Runner.plan_only(ModelFiles(model, configs=True), host(), options["device"], planned).model
        options = {**options, "ops": find_part_pins(tree, options["ops"])}
    return load_model(model, options, screen)


@contextmanager
def _name_options_of_reference(given: dict[str, Any]) -> Iterator[None]:
    """Errors about an option that the reference was given name the flag of the reference."""
    try:
        yield
    except InferplaneError as error:
        what = re.sub(rf"(?<!\w)({'|'.join(given) or '$'})(?= = )", r"against_\1", error.what)
        raise type(error)(what, there_is=error.there_is, remedy=error.remedy) from error


def _list_settings(of: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """What the page says of a model's options."""
    names = (*OF_EACH, *OF_MODEL, "ops")
    shown = {name: options.get(name) for name in names}
    return [(f"{of}: {name.replace('_', ' ')}", _in_words(value)) for name, value in shown.items() if value]


def _in_words(value: Any) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _show(found: SiteAudit, patterns: Sequence[str], screen: Screen) -> None:
    """Print figures and tables."""
    import fnmatch

    first, last = found.first, found.units[-1]
    screen.show(f"{found.windows:,} windows, {found.tokens:,} tokens, {len(found.sites):,} sites")
    if first is None:
        screen.show("no site diverges: none introduces an error above its threshold")
    else:
        run_by = f"{first.kernel} against {first.reference_kernel}"
        errors = f"introduces {first.introduced:.3g} ({first.introduced_by_token:.3g} by token)"
        screen.show(
            f"first to diverge: {first.modules} (site {first.site}, {run_by})",
            f"  {errors}, above {first.threshold:.3g}; {first.arrived:.3g} arrives",
        )
    counts = ", ".join(f"{found.count(role):,} {words}" for role, words in ROLES.items())
    screen.show(f"sites: {counts}", f"error of the last result: {last.out:.3g}")
    screen.show("", _site_table("over depth", found.units, by_token=True))
    if any(part.maximum for part in found.by_part):
        screen.show("", _part_table(found))
    most = sorted((each for each in found.sites if each.role == "introduces"), key=lambda each: -each.introduced)
    if most:
        screen.show("", _site_table("introduce most", most[:MOST_ROWS]))
    if patterns:
        matching = [
            each
            for each in found.sites
            if any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (each.site, each.modules))
        ]
        if matching:
            screen.show("", _site_table("that match", matching))
        else:
            screen.note(f"no site matches {' or '.join(patterns)}; there are such as {found.sites[-1].site}")
    for whose, kernels in found.fused.items():
        for kernel, sites in kernels.items():
            more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
            words = "is compared as a whole; --parts divides it"
            screen.note(f"{kernel} of the {whose} runs all of {sites[0]}{more} in one call, which {words}")


def _site_table(title: str, sites: Sequence[SiteErrors], *, by_token: bool = False) -> Table:
    """A row for each site; with `by_token` also errors by token."""
    columns = {"arrived": "arrived", "introduced": "introduced"}
    columns |= {"introduced_by_token": "by token"} if by_token else {}
    columns |= {"out": "result"} | ({"out_by_token": "by token"} if by_token else {})
    table = _table(title, *columns.values())
    table.add_column("")
    for each in sites:
        table.add_row(each.modules, *(f"{getattr(each, name):.3g}" for name in columns), each.role)
    return table


def _part_table(found: SiteAudit) -> Table:
    table = _table("equal sites of all layers", "sites", "introduce: median", "largest")
    table.add_column("at")
    for each in (part for part in found.by_part if part.maximum):
        table.add_row(each.part, f"{each.sites:,}", f"{each.median:.3g}", f"{each.maximum:.3g}", each.at)
    return table


def _table(first: str, *numbers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table
