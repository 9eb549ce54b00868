"""The options of `bench serve`, checked and completed before anything is sent."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from inferplane.cli.verbs.bench.length_distribution import parse_lengths
from inferplane.cli.verbs.bench.serve.address import ServerAddress, parse_url
from inferplane.cli.verbs.bench.serve.arrivals import Rate, parse_process, parse_rate
from inferplane.cli.verbs.bench.serve.datasets import RANDOM, DatasetOptions
from inferplane.cli.verbs.bench.serve.load import LevelPlan
from inferplane.cli.verbs.bench.serve.targets import parse_targets
from inferplane.errors import UsageError
from inferplane.files import check_writable

CONCURRENCY, REQUESTS, WARMUP, TIMEOUT_S = "8", 200, 1, 600.0
URL = "http://localhost:8000"
MAX_DIGITS = 9
"""Of a number of requests at a time."""
KEY_VARIABLES = ("INFERPLANE_API_KEY", "OPENAI_API_KEY")
"""Variables that a key is read from, in this order."""
FRAMING = ("host", "content-length", "transfer-encoding")
"""Headers that say what a message of HTTP is, which the client writes itself."""
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, section 5.6.2
_GRPC_NAME = re.compile(r"[0-9A-Za-z_.\-]+")
SECRET = ("api_key", "header")
"""Options whose values no report repeats."""


@dataclass(frozen=True)
class LoadOptions:
    """What the command does.

    Args:
        address: of the server.
        endpoint: one of `ENDPOINTS`.
        headers: of every request: the key, and what the user adds.
        dataset: what is sent.
        levels: one after the other.
        targets: of goodput.
        extra: fields of every body.
        shown: every option with its value, for reports.
    """

    address: ServerAddress
    endpoint: str
    headers: tuple[tuple[str, str], ...]
    dataset: DatasetOptions
    levels: tuple[LevelPlan, ...]
    targets: dict[str, float]
    extra: Mapping[str, Any]
    shown: dict[str, Any]


def read_options(args: argparse.Namespace) -> LoadOptions:
    """Check every option, and fill in what was left out.

    Raises:
        UsageError: an option is out of range or contradicts another one, or a report cannot be written.
    """
    address = parse_url(args.url if args.url is not None else URL)
    endpoint = args.endpoint or ("grpc" if address.is_grpc else "chat")
    if (endpoint == "grpc") != address.is_grpc:
        raise UsageError(
            f"--endpoint {endpoint} does not fit {address}.", remedy="gRPC's URLs begin with grpc:// or grpcs://"
        )
    for name in ("save", "html"):
        if (path := getattr(args, name)) is not None:
            try:
                check_writable(path)
            except UsageError as error:
                raise UsageError(f"--{name}: {error.what}", remedy=error.remedy) from error
    args.warmup = WARMUP if args.warmup is None else args.warmup
    _check_range(args, "warmup", 0)
    _check_range(args, "requests", 1)
    for name in ("timeout", "duration"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} {value:g}.", there_is="seconds above 0")
    args.timeout = TIMEOUT_S if args.timeout is None else args.timeout
    return LoadOptions(
        address,
        endpoint,
        _read_headers(args, address),
        _read_dataset(args),
        _read_levels(args),
        parse_targets(args.goodput or ()),
        _read_extra(args.extra_body),
        {**_list_shown(args), "url": str(address), "endpoint": endpoint},
    )


def _check_range(args: argparse.Namespace, name: str, minimum: int) -> None:
    value = getattr(args, name)
    if value is not None and value < minimum:
        raise UsageError(f"--{name.replace('_', '-')} {value}.", there_is=f"whole numbers from {minimum}")


def _list_shown(args: argparse.Namespace) -> dict[str, Any]:
    hidden = (*SECRET, "models", "json", "save", "html", "debug")
    plain = {name: value for name, value in vars(args).items() if name not in hidden and value is not None}
    return {name: value if isinstance(value, (int, float, list)) else str(value) for name, value in plain.items()}


def _read_headers(args: argparse.Namespace, address: ServerAddress) -> tuple[tuple[str, str], ...]:
    found = []
    # The server's variable holds several keys, separated by commas.
    key = args.api_key or next((k for name in KEY_VARIABLES if (k := os.environ.get(name, "").partition(",")[0])), "")
    key = key.strip(" ")
    if key:
        found.append(("Authorization", f"Bearer {key}"))
    for words in args.header:
        name, colon, value = (part.strip() for part in words.partition(":"))
        form = _GRPC_NAME if address.is_grpc else _NAME
        if not colon or any(not c.isprintable() for c in words) or not form.fullmatch(name):
            raise UsageError(
                f"--header {words!r} is not NAME: VALUE.",
                there_is="names of ASCII letters, digits and -",
                remedy="pass for example --header 'X-Tenant: a'",
            )
        if name.lower() in FRAMING:
            raise UsageError(f"--header {words!r} is one that the client writes itself.", remedy="leave it out")
        found.append((name, value))
    try:
        for _, value in found:
            value.encode("ascii" if address.is_grpc else "latin-1")
    except UnicodeEncodeError as error:
        raise UsageError(
            "The key or a header has characters that HTTP cannot carry.", remedy="pass plain letters"
        ) from error
    if any(not c.isprintable() for _, value in found for c in value):
        raise UsageError("The key has a line end or another control character.", remedy="remove it")
    return tuple(found)


def _read_dataset(args: argparse.Namespace) -> DatasetOptions:
    path = None if args.dataset is None or str(args.dataset) == RANDOM else args.dataset
    given = [
        name
        for name in ("input_len", "prefix_groups", "prefix_len", "conversation_len")
        if getattr(args, name) is not None
    ]
    if path is not None and given:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags} belongs to random prompts, not to a dataset.", remedy="leave it out")
    if (args.prefix_groups is None) != (args.prefix_len is None):
        raise UsageError("--prefix-groups and --prefix-len belong together.", remedy="pass both, or neither")
    _check_range(args, "prefix_groups", 1)
    _check_range(args, "prefix_len", 1)
    if args.whole_conversations and path is None:
        raise UsageError(
            "--whole-conversations belongs to a dataset.", remedy="pass --conversation-len for random ones"
        )
    if args.think_time is not None and not 0 <= args.think_time < math.inf:
        raise UsageError(f"--think-time {args.think_time:g}.", there_is="seconds from 0")
    return DatasetOptions(
        path,
        parse_lengths(args.input_len or "128", "--input-len"),
        None if args.output_len is None else parse_lengths(args.output_len, "--output-len"),
        args.prefix_groups or 0,
        args.prefix_len or 0,
        parse_lengths(args.conversation_len or "1", "--conversation-len"),
        args.whole_conversations,
        args.think_time or 0.0,
    )


def _read_levels(args: argparse.Namespace) -> tuple[LevelPlan, ...]:
    rates = [parse_rate(words) for words in args.rate.split(",")] if args.rate is not None else []
    if args.arrivals is not None and not rates:
        raise UsageError("--arrivals belongs to --rate.", remedy="pass --rate too")
    words = args.concurrency if args.concurrency is not None or rates else CONCURRENCY
    limits = [_read_count(word) for word in words.split(",")] if words is not None else []
    if len(rates) > 1 and len(limits) > 1:
        raise UsageError("--rate and --concurrency both have several levels.", remedy="sweep one of them")
    process = parse_process(args.arrivals or "poisson")
    requests = args.requests if args.requests is not None or args.duration is not None else REQUESTS
    if requests is None and any(math.isinf(rate.first) for rate in rates):
        raise UsageError(
            "--rate inf sends everything at once, so --duration alone does not end it.", remedy="pass --requests"
        )
    each_limit: list[int | None] = [*limits] or [None]
    each_rate: list[Rate | None] = [*rates] or [None]
    pairs = [(limit, rate) for limit in each_limit for rate in each_rate]
    return tuple(
        LevelPlan(limit, rate, process, requests, args.duration, args.seed + number)
        for number, (limit, rate) in enumerate(pairs)
    )


def _read_count(word: str) -> int:
    digits = word.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS) or int(digits) < 1:
        raise UsageError(
            f"--concurrency {word!r}.", there_is="whole numbers from 1, with commas between those of a sweep"
        )
    return int(digits)


def _read_extra(words: str | None) -> Mapping[str, Any]:
    if words is None:
        return {}
    try:
        found = json.loads(words)
        msgspec.json.encode(found)
    except (ValueError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--extra-body is not JSON that can be sent: {error}.", remedy="""pass for example '{"min_p": 0.1}'"""
        ) from error
    if not isinstance(found, dict):
        raise UsageError("--extra-body is no JSON object.", remedy="""pass for example '{"min_p": 0.1}'""")
    return found
