"""Measure a model on a device: latency of a batch, throughput of many requests, or start-up.

`inferplane bench serve` measures a server over HTTP or gRPC, and has options of its own, which its --help lists.

Prompts are random tokens of drawn lengths, or a dataset. Requests run on the engine itself, without a server.
A table goes to standard output, or the figures with --json; --save and --html write files. docs/benchmarks.md defines
every metric.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from inferplane.cli.arguments import Parser, add_examples, add_json, add_model, add_option, add_running, speculation
from inferplane.cli.screen import Screen
from inferplane.cli.verbs.bench.length_distribution import FORMS, parse_lengths
from inferplane.errors import UsageError
from inferplane.files import check_writable

KINDS = {
    "latency": "one batch of equal prompts, all at once",
    "throughput": "many requests, at once or as they arrive",
    "startup": "from a new process to the first token",
}
ONLY = {"rate": "throughput", "requests": "throughput", "dataset": "throughput", "compare": "throughput"}
"""Option -> the only kind that takes it."""
BATCH, REQUESTS, WARMUP, STARTS = {"latency": 1, "throughput": 16, "startup": 1}, 64, 1, 3
REPEATS = {"latency": 5, "throughput": 3, "startup": STARTS}


def add_arguments(parser: Parser) -> None:
    """Options of `bench`."""
    parser.usage = f"{parser.prog} {{{','.join(KINDS)}}} [MODEL] [options]"
    words = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=list(KINDS), help=words)
    add_model(parser)
    _add_work(parser)
    _add_engine(parser)
    files = parser.add_argument_group("reports")
    files.add_argument("--save", metavar="FILE", type=Path, help="write figures as JSON (docs/schemas/bench.json)")
    files.add_argument("--html", metavar="FILE", type=Path, help="write one page with plots that needs no other file")
    add_json(parser)
    add_running(parser)
    add_examples(
        parser,
        "latency --max-num-seqs 8 --input-len 128 --output-len 32",
        "throughput --output-len exp:64:512 --compare static",
        "startup path/to/model --device {X}",
    )


def _add_work(parser: Parser) -> None:
    work = parser.add_argument_group("what is run")
    work.add_argument("--input-len", metavar="L", default="32", help=f"tokens of a prompt: {FORMS}; left out: 32")
    work.add_argument("--output-len", metavar="L", default="32", help="tokens to generate per prompt, likewise")
    work.add_argument(
        "--dataset",
        metavar="FILE",
        type=Path,
        help="prompts instead of random tokens: lines of text, or in a .jsonl JSON objects with prompt and output_len",
    )
    work.add_argument("--requests", metavar="N", type=int, help=f"how many; left out: {REQUESTS}, or all of a dataset")
    work.add_argument("--rate", metavar="R", type=float, help="requests per second (Poisson); left out: all at once")
    work.add_argument("--seed", metavar="N", type=int, default=0, help="seed of lengths, tokens, arrivals and sampling")
    work.add_argument("--temperature", metavar="T", type=float, default=0.0, help="left out: 0, greedy")
    work.add_argument("--top-p", metavar="P", type=float, default=1.0, help="left out: 1")
    work.add_argument("--top-k", metavar="K", type=int, default=0, help="left out: 0, all")
    work.add_argument("--warmup", metavar="N", type=int, default=WARMUP, help=f"uncounted runs; left out: {WARMUP}")
    work.add_argument("--repeats", metavar="N", type=int, help=f"counted runs; left out: {_by_kind(REPEATS)}")
    work.add_argument("--compare", choices=["static"], help="also run the same requests in fixed batches, alternating")


def _add_engine(parser: Parser) -> None:
    engine = parser.add_argument_group("the engine")
    words = f"maximum sequences per step; left out: {_by_kind(BATCH)}"
    add_option(engine, "max_num_seqs", default=None, help=words)
    add_option(engine, "max_num_batched_tokens", default=None, help="maximum tokens per step")
    words = "reuse equal prefixes; repeats then hit the cache"
    add_option(engine, "enable_prefix_caching", action="store_true", default=False, help=words)


def _by_kind(values: dict[str, int]) -> str:
    return ", ".join(f"{value} ({kind})" for kind, value in values.items())


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Check the options, measure, report."""
    check(args)
    from inferplane.cli.model_loading import locate_models
    from inferplane.cli.verbs.bench import measurements, report

    locate_models(args, screen)

    measurement = (
        measurements.measure_startup(args, screen)
        if args.kind == "startup"
        else measurements.measure_engine(args, screen)
    )
    report.show(measurement, screen)
    report.write(measurement, args.save, args.html, screen)
    return 0


def check(args: argparse.Namespace) -> None:
    """Check every option before a model is loaded, and fill in the defaults that depend on the kind.

    Raises:
        UsageError: an option is out of range or belongs to another kind, or a report cannot be written.
    """
    for name, kind in ONLY.items():
        if getattr(args, name) is not None and args.kind != kind:
            raise UsageError(f"bench {args.kind} takes no --{name}.", remedy=f"leave it out, or use bench {kind}")
    if args.compare and args.rate is not None:
        raise UsageError(
            "--compare static takes no --rate: its batches do not wait for arrivals.", remedy="leave one of them out"
        )
    speculation(args)  # refuses drafts without a method
    args.max_num_seqs = BATCH[args.kind] if args.max_num_seqs is None else args.max_num_seqs
    args.repeats = REPEATS[args.kind] if args.repeats is None else args.repeats
    for name in ("max_num_seqs", "repeats", "warmup", "requests", "max_num_batched_tokens"):
        value, minimum = getattr(args, name), int(name != "warmup")
        if value is not None and value < minimum:
            raise UsageError(f"{name} = {value}.", there_is=f"whole numbers from {minimum}")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        raise UsageError(f"--rate {args.rate:g}.", there_is="numbers above 0")
    args.input_lengths = parse_lengths(args.input_len, "--input-len")
    args.output_lengths = parse_lengths(args.output_len, "--output-len")
    if args.kind != "throughput" and {args.input_lengths.kind, args.output_lengths.kind} != {"fixed"}:
        raise UsageError(f"bench {args.kind} takes fixed lengths only.", remedy="use bench throughput")
    for option in ("save", "html"):
        path = getattr(args, option)
        if path is not None:
            try:
                check_writable(path)
            except UsageError as error:
                raise UsageError(f"--{option}: {error.what}", remedy=error.remedy) from error
