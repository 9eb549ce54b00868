"""The course of a benchmark of a server: connect, check with one request, warm up, run each level."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from inferplane import __version__
from inferplane.cli.screen import Screen, escape_controls
from inferplane.cli.verbs.bench.environment import report_date
from inferplane.cli.verbs.bench.length_distribution import Lengths
from inferplane.cli.verbs.bench.serve.arrivals import Process
from inferplane.cli.verbs.bench.serve.datasets import Dataset
from inferplane.cli.verbs.bench.serve.dialects import ENDPOINTS, MAX_COUNT, UNREADABLE, BodyOptions, error_words
from inferplane.cli.verbs.bench.serve.event_stream import StreamError
from inferplane.cli.verbs.bench.serve.figures import level_figures
from inferplane.cli.verbs.bench.serve.http_client import HttpAnswer, HttpClient, NoAnswerError
from inferplane.cli.verbs.bench.serve.load import LevelPlan, Load
from inferplane.cli.verbs.bench.serve.measurement import ServeMeasurement
from inferplane.cli.verbs.bench.serve.options import LoadOptions
from inferplane.cli.verbs.bench.serve.prompts import TextSource
from inferplane.cli.verbs.bench.serve.records import RequestRecord
from inferplane.cli.verbs.bench.serve.senders import GrpcSender, HttpSender, Sender, make_tls
from inferplane.errors import EngineError, UsageError
from inferplane.serving.lifecycle.descriptors import limit_connections, raise_limit

AGENT = ("User-Agent", f"inferplane/{__version__}")
ONE = Lengths("fixed", 1, 1)
CHECK_S = 10.0
"""Seconds for the list of models."""
MAX_CPU_SHARE = 0.8
"""Of a core; a client that takes more may be what limits the figures."""
OPTIONAL = {"stream_options": "with_usage", "ignore_eos": "ignore_eos"}
"""Field of a body that a server may refuse -> the option that leaves it out."""


async def measure(args: argparse.Namespace, options: LoadOptions, screen: Screen) -> ServeMeasurement:
    """Run the benchmark.

    Raises:
        UsageError: an option does not fit the server, or the system.
        EngineError: the server cannot be reached, or does not answer the first request.
    """
    _check_descriptors(options)
    texts = TextSource(random.Random(f"texts {args.seed}"), args.tokenizer)
    requests = [plan.max_requests for plan in options.levels]
    dataset = Dataset(options.dataset, texts, args.seed, None if None in requests else sum(n or 0 for n in requests))
    if dataset.has_token_ids and options.endpoint == "chat":
        raise UsageError("The dataset has token ids, which a chat cannot have.", remedy="pass --endpoint completions")
    environment = _describe(options)
    sender: Sender
    if options.address.is_grpc:
        environment |= {"model": args.model or "", "server": ""}
        sender = GrpcSender(options.address, options.headers, _read_roots(), args.model or "")
    else:
        client = HttpClient(
            options.address, (AGENT, *options.headers), make_tls(options.address, insecure=args.insecure)
        )
        sender = HttpSender(client, ENDPOINTS[options.endpoint])
        environment |= await _look_up(client, args.model)
    body = BodyOptions(
        environment["model"], args.temperature, args.top_p, args.top_k, args.ignore_eos, extra=options.extra
    )
    load = Load(sender, options.endpoint, body, args.timeout, texts.count if texts.is_exact else None)
    measurement = ServeMeasurement(environment, options.shown)
    try:
        with _interruptible(load):
            await _warm_up(load, args.warmup, options, _make_warmup(options, args.seed), measurement)
            await _run_levels(load, options, dataset, measurement, screen)
    finally:
        await sender.disconnect()
    _add_notes(measurement, dataset)
    return measurement


def _check_descriptors(options: LoadOptions) -> None:
    raise_limit()
    most = max((plan.concurrency or 0 for plan in options.levels), default=0)
    if not options.address.is_grpc and limit_connections(most) < most:
        raise UsageError(
            f"--concurrency {most} needs as many open files; this system allows {limit_connections(most)} connections.",
            remedy="raise its limit (`ulimit -n`), or pass a smaller number",
        )


def _describe(options: LoadOptions) -> dict[str, Any]:
    return {
        "date": report_date(),
        "url": str(options.address),
        "endpoint": options.endpoint,
        "client": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"inferplane": __version__, "python": platform.python_version()},
    }


def _read_roots() -> bytes | None:
    """The file that OpenSSL is given certificates in, which gRPC does not read by itself."""
    path = os.environ.get("SSL_CERT_FILE")
    return Path(path).read_bytes() if path else None


async def _look_up(client: HttpClient, model: str | None) -> dict[str, Any]:
    """The model's name and the server's, from its list of models."""
    url = client.address
    try:
        answer = await client.get("/v1/models", CHECK_S)
    except TimeoutError as error:
        remedy = "check --url" + (": perhaps the server speaks http://" if url.is_encrypted else ", and that it runs")
        raise EngineError(f"{url} does not answer within {CHECK_S:g} s.", remedy=remedy) from error
    except NoAnswerError as error:
        remedy = "check --url, and that the server runs"
        if "certificate" in str(error):
            remedy = "set SSL_CERT_FILE to the file with its authority's certificate, or pass --insecure"
        elif url.is_encrypted and "TLS" in str(error):
            remedy = "check --url: perhaps the server speaks http://"
        elif not url.is_encrypted and "closed" in str(error):
            remedy = "check --url: perhaps the server speaks https:// or grpc://"
        raise EngineError(f"{url}: {error}.", remedy=remedy) from error
    except StreamError as error:
        raise EngineError(
            f"{url}: {error}.", remedy="check --url: perhaps the server speaks https:// or grpc://"
        ) from error
    if answer.status in (401, 403):
        raise UsageError(
            f"{url} refuses the key: {answer.status} {error_words(answer.body)}",
            remedy="pass --api-key, or set INFERPLANE_API_KEY",
        )
    names = _names_of(answer)
    if model is None and not names:
        where = f"{url}/v1/models"
        if 300 <= answer.status < 400:
            where += f" redirects to {answer.headers.get('location', 'an unnamed place')}, and"
        raise UsageError(f"{where} lists no model (status {answer.status}).", remedy="check --url, or pass --model")
    # What a server sends goes to the terminal: no control characters.
    server = escape_controls(answer.headers.get("server", ""))
    return {"model": model if model is not None else names[0], "server": server}


def _names_of(answer: HttpAnswer) -> list[str]:
    try:
        listed = msgspec.json.decode(answer.body) if answer.status == 200 else {}
        return [entry["id"] for entry in listed["data"] if isinstance(entry["id"], str) and entry["id"].isprintable()]
    except (*UNREADABLE, KeyError, TypeError):
        return []


def _make_warmup(options: LoadOptions, seed: int) -> Dataset:
    """Random prompts in place of the dataset's, of which a cache must not know any yet."""
    texts = TextSource(random.Random(f"warmup texts {seed}"), None)
    return Dataset(replace(options.dataset, path=None, conversation=ONE, think=0.0), texts, seed)


async def _warm_up(
    load: Load, count: int, options: LoadOptions, dataset: Dataset, measurement: ServeMeasurement
) -> None:
    """Send requests that do not count; the first one finds out what the server accepts."""
    if not count:
        return
    plan = LevelPlan(1, None, Process(1.0), 1, None)
    while True:
        first = (await load.run(plan, dataset)).records[0]
        if load.is_stopped or not first.failure:
            break
        refused = next((f for f in OPTIONAL if f in first.error and getattr(load.options, OPTIONAL[f])), None)
        if refused is None or not first.error.startswith(("400", "422")):
            raise _no_answer(first, options)
        load.options = load.options.without(OPTIONAL[refused])
        measurement.notes.append(f"The server refuses {refused}, so requests are sent without it.")
    most = max(min(count - 1, plan.concurrency or count) for plan in options.levels)
    if count > 1 and not load.is_stopped:
        await load.run(replace(plan, concurrency=most, max_requests=count - 1), dataset)


def _no_answer(record: RequestRecord, options: LoadOptions) -> EngineError:
    what = f"{options.address} did not answer the first request: {record.error.rstrip('.')}."
    key, place = (
        "pass --api-key, or set INFERPLANE_API_KEY",
        f"check --url, --model and --endpoint ({', '.join(ENDPOINTS)})",
    )
    remedies = {
        **dict.fromkeys(("401", "403", "UNAUTHENTICATED", "PERMISSION_DENIED"), key),
        **dict.fromkeys(("404", "405", "NOT_FOUND", "UNIMPLEMENTED"), place),
        "UNAVAILABLE": "check --url, and that the server runs",
    }
    otherwise = "send one request by other means, or pass --warmup 0 to go on all the same"
    return EngineError(what, remedy=remedies.get(record.error.partition(":")[0], otherwise))


async def _run_levels(
    load: Load, options: LoadOptions, dataset: Dataset, measurement: ServeMeasurement, screen: Screen
) -> None:
    total = sum(plan.max_requests or 0 for plan in options.levels)
    with screen.progress_counter("requests", total or None) as on_done:
        load.on_done = on_done
        for plan in options.levels:
            if load.is_stopped:
                break
            result = await load.run(plan, dataset)
            measurement.results.append(result)
            measurement.figures.append(level_figures(result, options.targets))


@contextmanager
def _interruptible(load: Load) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM stop the load, so that it is reported; a second one ends the command."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def stop() -> None:
        restore()
        load.stop()

    for number in before:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        if not load.is_stopped:
            restore()


def _add_notes(measurement: ServeMeasurement, dataset: Dataset) -> None:
    notes = measurement.notes
    wrong = sum(record.has_wrong_usage for result in measurement.results for record in result.records)
    if wrong:
        notes.append(
            f"The server's usage was refused in {wrong} of its answers: "
            f"a count is negative, no whole number or above {MAX_COUNT}."
        )
    given = "no usage that is right" if wrong else "no usage"
    counted = {how for figures in measurement.figures for how in figures["tokens"]["counted_by"]}
    if "chunks" in counted:
        notes.append(
            f"The server gives {given}: output tokens are events with text, of which one may have several tokens. "
            "Pass --tokenizer FOLDER to count them."
        )
    elif "tokenizer" in counted:
        notes.append(f"The server gives {given}: output tokens were counted by --tokenizer.")
    if any(figures["tokens"]["without_prompt_count"] for figures in measurement.figures):
        notes.append("Prompt tokens are those of requests for which the server gave a count.")
    if dataset.left_out:
        notes.append(f"{dataset.left_out} conversations of the dataset are too long or too short, and were left out.")
    if dataset.repeats:
        notes.append(
            f"The dataset of {len(dataset.entries)} conversations was used more than once: "
            "a prefix cache may have answered."
        )
    if any(figures["client_cpu_share"] > MAX_CPU_SHARE for figures in measurement.figures):
        notes.append("This client used most of a core: it may be what limits the figures.")
