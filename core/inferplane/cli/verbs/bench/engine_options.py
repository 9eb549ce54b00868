"""The options of one benchmark as the engine takes them and as the reports show them."""

from __future__ import annotations

import argparse
from typing import Any

from inferplane.cli.model_loading import model_options


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` for a benchmark, JSON-ready."""
    names = ("max_num_seqs", "enable_prefix_caching", "max_num_batched_tokens")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return {**model_options(args), **given}


def list_requested_options(args: argparse.Namespace) -> dict[str, Any]:
    """Every option of the benchmark with its value, for the reports."""
    work = {name: getattr(args, name) for name in ("rate", "seed", "temperature", "top_p", "top_k", "warmup")}
    lens = {"input_len": str(args.input_lengths), "output_len": str(args.output_lengths)}
    file = {"dataset": None if args.dataset is None else str(args.dataset)}
    return {**engine_options(args), **lens, **file, **work, "repeats": args.repeats, "compare": args.compare}
