"""The three measurements; each returns a `Measurement`, which the reports are made of."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferplane.cli.screen import Screen
from inferplane.cli.verbs.bench import REQUESTS, startup, statistics, workload
from inferplane.cli.verbs.bench.engine_options import engine_options, list_requested_options
from inferplane.cli.verbs.bench.environment import environment
from inferplane.cli.verbs.bench.job_runner import Trace, run_jobs
from inferplane.cli.verbs.bench.workload import BenchJob
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine import LLM, SamplingParams

SHOWN = {"latency": ("prefill_tokens", "output_tokens"), "throughput": ("requests", "output_tokens", "total_tokens")}


@dataclass
class Measurement:
    """The figures of one benchmark.

    Args:
        kind: "latency", "throughput" or "startup".
        environment: device, versions, plan, date.
        options: the options of the command.
        latencies: metric -> `statistics.summary` over all repeats.
        rates: metric -> `statistics.spread` over repeats.
        traces: the repeats; none for start-up.
        compared: the same jobs in static batches, one run beside each repeat.
        ratio: output tokens per second of continuous over static batching.
        speculation: drafted and accepted tokens by position.
    """

    kind: str
    environment: dict[str, Any]
    options: dict[str, Any]
    latencies: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    compared: list[Trace] = field(default_factory=list)
    ratio: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None


def measure_engine(args: argparse.Namespace, screen: Screen) -> Measurement:
    """Measure `latency` or `throughput` on one engine; with --compare, both ways of batching take turns to go first."""
    with screen.loading(f"loading {args.model}") as loading:
        from inferplane.engine import LLM

        llm = LLM(**engine_options(args), progress=loading.bar)
    with llm:
        jobs, params = _jobs(args, llm), _sampling(args)
        batches = {"continuous": None, "static": args.max_num_seqs} if args.compare else {"continuous": None}
        with screen.progress_counter(args.kind, (args.warmup + args.repeats) * len(jobs) * len(batches)) as on_done:
            for _ in range(args.warmup):
                for batch in batches.values():
                    run_jobs(llm.engine, jobs, params, on_done, batch)
            before = llm.engine.stats()
            found: dict[str, list[Trace]] = {name: [] for name in batches}
            for repeat in range(args.repeats):
                for name in list(batches) if repeat % 2 == 0 else reversed(list(batches)):
                    found[name].append(run_jobs(llm.engine, jobs, params, on_done, batches[name]))
        traces, compared = found["continuous"], found.get("static", [])
        return Measurement(
            args.kind,
            environment(llm),
            list_requested_options(args) | {"requests": len(jobs)},
            {name: statistics.summary(values) for name, values in statistics.latencies(traces).items()},
            statistics.over_repeats(traces, SHOWN[args.kind]) | _static_rates(compared),
            traces,
            compared,
            statistics.ratio(traces, compared) if compared else None,
            statistics.speculation(before, llm.engine.stats()),
        )


def _static_rates(traces: list[Trace]) -> dict[str, Any]:
    names = ["output_tokens"] if traces else []
    return {f"static_{name}": s for name, s in statistics.over_repeats(traces, names).items()}


def measure_startup(args: argparse.Namespace, screen: Screen) -> Measurement:
    """Measure the start-up of new processes, one after the other."""
    with screen.progress_counter("starting", args.warmup + args.repeats) as on_done:
        runs = startup.time_starts(args, on_done)
    runs = runs[args.warmup :]
    phases = {name: statistics.spread([run["phases"][name] for run in runs], "s") for name in runs[0]["phases"]}
    return Measurement(args.kind, runs[-1]["environment"], list_requested_options(args), rates=phases)


def _sampling(args: argparse.Namespace) -> SamplingParams:
    from inferplane.engine import SamplingParams

    return SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)


def _jobs(args: argparse.Namespace, llm: LLM) -> list[BenchJob]:
    if args.dataset is not None:
        encode = lambda text: llm.tokenizer.encode(text)  # noqa: E731 - loads the tokenizer only if there is text
        jobs = workload.read_jobs(args.dataset, args.requests, args.output_lengths, encode, args.seed)
    else:
        count = args.max_num_seqs if args.kind == "latency" else args.requests or REQUESTS
        jobs = workload.random_jobs(count, args.input_lengths, args.output_lengths, list_ordinary_ids(llm), args.seed)
    return workload.with_arrivals(jobs, args.rate, args.seed)


def list_ordinary_ids(llm: LLM) -> Sequence[int]:
    """List the model's token ids without the special ones that its tokenizer or config names.

    Raises:
        UsageError: the model has special tokens only.
    """
    special: set[int] = set()
    known = llm.engine.vocab
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = llm.files.config.get(name)
        special.update(value if isinstance(value, (list, tuple)) else [-1 if value is None else value])
    if llm.files.has_tokenizer:
        special |= set(llm.tokenizer.fast.all_special_ids) | llm.end_ids()
        special |= set(llm.tokenizer.fast.added_tokens_decoder)
        known = min(known, len(llm.tokenizer.fast))
    ids = [i for i in range(known) if i not in special]
    if not ids:
        raise UsageError("The model has special tokens only.", remedy="pass --dataset")
    return ids
