"""Loads that others have published, by name: values of options that the user does not give."""

from __future__ import annotations

import argparse
from typing import Any

from inferplane.errors import UsageError

PRESETS: dict[str, dict[str, Any]] = {
    "paddlenlp": {
        "endpoint": "native",
        "requests": 3000,
        "concurrency": "256",
        "output_len": "2048",
        "warmup": 256,
        "temperature": 0.6,
        "top_p": 0.95,
    },
    "vllm": {"requests": 1000, "rate": "inf", "input_len": "1024", "output_len": "128", "temperature": 0.0},
}
"""Name -> option -> value.

paddlenlp: the source system's published run, of a ShareGPT file: 3,000 prompts, 256 at once, at most 2,048 tokens
each, after as many warm-up requests as run at once. Source: PaddleNLP, llm/benchmark/serving/benchmark_client.py.
vllm: what `vllm bench serve` does if it is given no options.
"""
WORDS = {
    "paddlenlp": "3,000 prompts of a ShareGPT file, 256 at a time, 2,048 tokens each",
    "vllm": "1,000 random prompts of 1,024 tokens, all at once, 128 tokens each",
}
PACES = ("rate", "concurrency")
"""Options of which the user's own keeps out the preset's."""
NEEDS_DATASET = frozenset(("paddlenlp",))


def apply_preset(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with those of the preset in place of what was left out.

    Raises:
        UsageError: the preset needs a file.
    """
    if args.preset is None:
        return args
    if args.preset in NEEDS_DATASET and args.dataset is None:
        raise UsageError(
            f"--preset {args.preset} needs the prompts of a ShareGPT file.",
            remedy="pass --dataset with ShareGPT_V3_unfiltered_cleaned_split.json, or what PaddleNLP's filter writes",
        )
    given = dict(vars(args).items())
    paced = args.rate is not None or args.concurrency is not None
    preset = {k: v for k, v in PRESETS[args.preset].items() if given[k] is None and not (paced and k in PACES)}
    return argparse.Namespace(**{**given, **preset})
