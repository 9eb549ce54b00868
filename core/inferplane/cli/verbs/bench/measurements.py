"""The three measurements; each returns a `Measurement`, which the reports are made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import pins, speculation
from inferplane.cli.screen import Screen
from inferplane.cli.verbs.bench import job_runner as drive
from inferplane.cli.verbs.bench import startup as startup_runs
from inferplane.cli.verbs.bench import statistics, workload
from inferplane.cli.verbs.bench.environment import environment
from inferplane.cli.verbs.bench.job_runner import Trace
from inferplane.cli.verbs.bench.workload import BenchJob
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine import LLM, SamplingParams

SHOWN = {"latency": ("prefill_tokens", "output_tokens"), "throughput": ("requests", "output_tokens", "total_tokens")}
REQUESTS = 64


@dataclass
class Measurement:
    """What a benchmark found.

    Args:
        kind: "latency", "throughput" or "startup".
        environment: device, versions, plan, date.
        options: what was asked.
        latencies: metric -> `statistics.summary`, of all repeats together.
        rates: metric -> `statistics.spread` over repeats.
        traces: the repeats; none for start-up.
        compared: the same jobs in static batches, turn by turn.
        ratio: continuous over static batching, output tokens a second.
        speculation: drafted and accepted by position.
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
    """`latency` and `throughput`."""
    with screen.loading(f"loading {args.model}") as loading:
        from inferplane.engine import LLM

        llm = LLM(**model_options(args), progress=loading.bar)
    with llm:
        jobs, params = _jobs(args, llm), _sampling(args)
        ways: dict[str, Callable[..., Trace]] = {"continuous": drive.run_continuous}
        if args.compare:
            ways["static"] = partial(drive.run_static, batch=args.max_batch)
        with screen.progress_counter(args.kind, (args.warmup + args.repeats) * len(jobs) * len(ways)) as told:
            for _ in range(args.warmup):
                for way in ways.values():
                    way(llm.engine, jobs, params, told)
            before = llm.engine.stats()
            found: dict[str, list[Trace]] = {name: [] for name in ways}
            for turn in range(args.repeats):
                for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
                    found[name].append(ways[name](llm.engine, jobs, params, told))
        traces, compared = found["continuous"], found.get("static", [])
        return Measurement(
            args.kind,
            environment(llm),
            options(args) | {"requests": len(jobs)},
            {name: statistics.summary(values) for name, values in statistics.latencies(traces).items()},
            statistics.over_repeats(traces, SHOWN[args.kind])
            | ({"static_output_tokens": _output(compared)} if compared else {}),
            traces,
            compared,
            statistics.ratio(traces, compared) if compared else None,
            statistics.speculation(before, llm.engine.stats()),
        )


def _output(traces: list[Trace]) -> dict[str, Any]:
    found: dict[str, Any] = statistics.over_repeats(traces, ["output_tokens"])["output_tokens"]
    return found


def startup(args: argparse.Namespace, screen: Screen) -> Measurement:
    """Fresh processes, one after the other."""
    with screen.progress_counter("starting", args.warmup + args.repeats) as told:
        told_all = startup_runs.run(args, told)
    plural = told_all[args.warmup :]
    phases = {name: statistics.spread([run["phases"][name] for run in plural], "s") for name in plural[0]["phases"]}
    return Measurement(args.kind, plural[-1]["environment"], options(args), rates=phases)


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM`, JSON-ready."""
    chosen = {
        "model": args.model,
        "device": args.device,
        "index": args.index,
        "dtype": args.dtype,
        "kv_dtype": args.kv_dtype,
        "quantization": args.quantization,
        "max_model_len": args.max_model_len,
        "strict": args.strict,
        "ops": pins(args.ops),
        "lock": args.lock,
        "load_format": args.load_format,
        "max_batch": args.max_batch,
        "prefix_cache": args.prefix_cache,
        "speculative": speculation(args),
    }
    return chosen if args.max_step_tokens is None else {**chosen, "max_step_tokens": args.max_step_tokens}


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked, for the reports."""
    work = {name: getattr(args, name) for name in ("rate", "seed", "temperature", "top_p", "top_k", "warmup")}
    lens = {"input_len": str(args.input_lengths), "output_len": str(args.output_lengths)}
    file = {"dataset": None if args.dataset is None else str(args.dataset)}
    return {**model_options(args), **lens, **file, **work, "repeats": args.repeats, "compare": args.compare}


def _sampling(args: argparse.Namespace) -> SamplingParams:
    from inferplane.engine import SamplingParams

    return SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)


def _jobs(args: argparse.Namespace, llm: LLM) -> list[BenchJob]:
    if args.dataset is not None:
        encode = lambda text: llm.tokenizer.encode(text)  # noqa: E731 - a tokenizer only if there is text
        jobs = workload.read_jobs(args.dataset, args.requests, args.output_lengths, encode, args.seed)
    else:
        count = args.max_batch if args.kind == "latency" else args.requests or REQUESTS
        jobs = workload.random_jobs(count, args.input_lengths, args.output_lengths, list_ordinary_ids(llm), args.seed)
    return workload.with_arrivals(jobs, args.rate, args.seed)


def list_ordinary_ids(llm: LLM) -> Sequence[int]:
    """Every token id of the model but special ones: those that its tokenizer or its config names.

    Raises:
        UsageError: there is none.
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
