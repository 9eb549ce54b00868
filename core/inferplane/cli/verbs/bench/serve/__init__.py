"""Send requests to a server, and measure what its clients see: latencies, throughput, failures.

The server is any that streams OpenAI's API (Inferplane, vLLM, SGLang, llama.cpp, ...), or that speaks the native
dialect or gRPC. Several concurrencies or rates, with commas between them, run one after the other. A table goes to
standard output, or the figures with --json; --save and --html write files. Ctrl-C ends the run, and what was measured
is reported. docs/benchmarks.md defines every metric.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from inferplane.cli.arguments import Parser, add_examples, add_flags, add_json
from inferplane.cli.screen import Screen
from inferplane.cli.signals import INTERRUPTED
from inferplane.cli.verbs.bench.length_distribution import FORMS as LENGTHS
from inferplane.cli.verbs.bench.serve import arrivals
from inferplane.cli.verbs.bench.serve.dialects import ENDPOINTS
from inferplane.cli.verbs.bench.serve.options import CONCURRENCY, REQUESTS, TIMEOUT_S, URL, WARMUP, read_options
from inferplane.cli.verbs.bench.serve.presets import PRESETS, WORDS, apply_preset
from inferplane.errors import UsageError

FAILED = 1


def add_arguments(parser: Parser) -> None:
    """Options of `bench serve`."""
    parser.usage = f"{parser.prog} [--url URL] [options]"
    parser.add_argument("models", nargs="*", help=argparse.SUPPRESS)  # refused with what to do in its place
    _add_server(parser)
    _add_prompts(parser)
    _add_load(parser)
    files = parser.add_argument_group("reports")
    words = "count requests that met these targets, as ttft:500 tpot:50 e2e:5000 (milliseconds)"
    files.add_argument("--goodput", metavar="METRIC:MS", nargs="+", help=words)
    files.add_argument(
        "--save", metavar="FILE", type=Path, help="write figures as JSON (docs/schemas/bench_serve.json)"
    )
    files.add_argument("--html", metavar="FILE", type=Path, help="write one page with plots that needs no other file")
    add_json(parser)
    add_examples(
        parser,
        "--url localhost:8000 --concurrency 1,4,16 --html a.html",
        "--dataset a.jsonl --rate 4 --goodput ttft:500 tpot:50",
        "--url grpc://localhost:8001 --requests 100",
    )


def _add_server(parser: Parser) -> None:
    server = parser.add_argument_group("the server")
    words = f"of the server, with a path if it has one; https://, grpc:// or grpcs:// too; left out: {URL}"
    add_flags(server, ("--url", "--base-url"), metavar="URL", help=words)
    words = "route of the requests; left out: chat, or grpc for such a URL"
    server.add_argument("--endpoint", choices=list(ENDPOINTS), help=words)
    server.add_argument("--model", metavar="NAME", help="left out: the first that the server lists")
    words = "sent as a bearer token; left out: the variable INFERPLANE_API_KEY, or OPENAI_API_KEY"
    server.add_argument("--api-key", metavar="KEY", help=words)
    server.add_argument(
        "--header", metavar="NAME:VALUE", action="append", default=[], help="of every request; repeatable"
    )
    server.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    words = f"seconds that a request may take; left out: {TIMEOUT_S:g}"
    server.add_argument("--timeout", metavar="S", type=float, help=words)


def _add_prompts(parser: Parser) -> None:
    work = parser.add_argument_group("what is sent")
    words = "ShareGPT's form (a JSON list of conversations), or JSON lines with prompt, messages or conversation"
    add_flags(work, ("--dataset", "--dataset-path"), metavar="FILE", type=Path, help=f"{words}; left out: random words")
    words = f"tokens of a random prompt: {LENGTHS}; left out: 128"
    add_flags(work, ("--input-len", "--random-input-len"), metavar="L", help=words)
    words = "most tokens to generate, likewise; left out: as the dataset says, or 128"
    add_flags(work, ("--output-len", "--random-output-len"), metavar="L", help=words)
    work.add_argument("--prefix-groups", metavar="N", type=int, help="random prompts begin with one of N prefixes")
    work.add_argument("--prefix-len", metavar="N", type=int, help="tokens of a prefix")
    words = "requests of a random conversation, likewise; each is sent after the answer to the last; left out: 1"
    work.add_argument("--conversation-len", metavar="L", help=words)
    words = "play every message of a dataset's conversations; left out: the first exchange"
    work.add_argument("--whole-conversations", action="store_true", help=words)
    words = "mean seconds before each further request of a conversation; left out: 0"
    work.add_argument("--think-time", metavar="S", type=float, help=words)
    words = "a folder with the model's tokenizer, for exact lengths, and counts where the server gives none"
    work.add_argument("--tokenizer", metavar="FOLDER", type=Path, help=words)
    work.add_argument("--ignore-eos", action="store_true", help="generate all tokens, on servers that know this field")
    work.add_argument("--temperature", metavar="T", type=float, help="left out: the server's")
    work.add_argument("--top-p", metavar="P", type=float, help="left out: the server's")
    work.add_argument("--top-k", metavar="K", type=int, help="left out: the server's")
    work.add_argument("--extra-body", metavar="JSON", help="an object of further fields; null removes a field")
    work.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts, lengths and arrivals")


def _add_load(parser: Parser) -> None:
    load = parser.add_argument_group("how it is sent")
    words = f"requests at a time, with commas for several levels; left out: {CONCURRENCY}, or no limit with --rate"
    add_flags(load, ("--concurrency", "--max-concurrency"), metavar="N,...", help=words)
    words = (
        "conversations a second, with commas for several levels; R1:R2 grows from one to the other, inf is all at once"
    )
    add_flags(load, ("--rate", "--request-rate"), metavar="R,...", help=words)
    load.add_argument("--arrivals", metavar="P", help=f"with --rate: {arrivals.FORMS}; left out: poisson")
    words = f"of each level; left out: {REQUESTS}, or no limit with --duration"
    add_flags(load, ("--requests", "--num-prompts"), metavar="N", type=int, help=words)
    words = "seconds of each level in which requests are sent; those that run go on to their end"
    load.add_argument("--duration", metavar="S", type=float, help=words)
    load.add_argument("--warmup", metavar="N", type=int, help=f"requests that do not count; left out: {WARMUP}")
    words = "; ".join(f"{name}: {WORDS[name]}" for name in PRESETS)
    load.add_argument("--preset", choices=list(PRESETS), help=f"options that are left out are those of {words}")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Check the options, measure, report."""
    if args.models:
        raise UsageError(
            f"bench serve measures a server that runs, and takes no model: {args.models[0]!r}.",
            remedy="start one, as with `inferplane serve MODEL`, and pass its address as --url",
        )
    args = apply_preset(args)
    options = read_options(args)
    from inferplane.cli.verbs.bench.serve import report
    from inferplane.cli.verbs.bench.serve.benchmark import measure

    measurement = asyncio.run(measure(args, options, screen))
    for note in measurement.notes:
        screen.note(note)
    if measurement.results:
        report.show(measurement, screen)
        report.write(measurement, args.save, args.html, screen)
    if not measurement.results:
        screen.note("interrupted before anything was measured")
    if measurement.is_interrupted or not measurement.results:
        return INTERRUPTED
    return 0 if measurement.num_ended else FAILED
