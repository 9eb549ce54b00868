"""Start-up, timed in processes of their own, since nothing is as new a second time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from inferplane import errors
from inferplane.errors import GenerationError, InferplaneError

PROMPT_ID = 1


def run(args: argparse.Namespace, told: Callable[[], None]) -> list[dict[str, Any]]:
    """Start `warmup + repeats` processes, one after the other; `{"phases": {name: seconds}, "environment"}` of each.

    Raises:
        GenerationError: one ended without an answer; its own words are in the message.
        InferplaneError: what the model's start raised there.
    """
    from inferplane.cli.verbs.bench.measurements import model_options

    out = []
    for _ in range(args.warmup + args.repeats):
        asked = {"llm": model_options(args), "prompt": [PROMPT_ID] * args.input_lengths.low, "begun": time.time()}
        done = subprocess.run(
            [sys.executable, "-m", "inferplane.cli.verbs.bench.startup_process"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            if (refused := _refusal(done.stdout)) is not None:
                raise refused
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise GenerationError(f"A process did not start the model: {lines[-1]}")
        out.append(json.loads(done.stdout.splitlines()[-1]))
        told()
    return out


def _refusal(print_remark: str) -> InferplaneError | None:
    """The error that a process ended with, if it was one raised on purpose."""
    try:
        told = json.loads(print_remark.splitlines()[-1])["error"]
        kind: Any = getattr(errors, told.pop("kind"), object)
        refused: InferplaneError | None = None
        if issubclass(kind, InferplaneError):
            refused = kind(told.pop("what"), **told)
        return refused
    except (IndexError, KeyError, TypeError, ValueError):
        return None
