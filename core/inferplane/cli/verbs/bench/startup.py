"""Times the start of a model in new processes, since a second start in one process finds its modules imported."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from inferplane import errors
from inferplane.cli.verbs.bench.engine_options import engine_options
from inferplane.errors import GenerationError, InferplaneError

PROMPT_ID = 1


def time_starts(args: argparse.Namespace, on_done: Callable[[], None]) -> list[dict[str, Any]]:
    """Start `warmup + repeats` processes, one after the other.

    Returns:
        `{"phases": {name: seconds}, "environment"}` of each process.

    Raises:
        GenerationError: a process ended without a result; its last line is in the message.
        InferplaneError: the error that the model's start raised there.
    """
    out = []
    for _ in range(args.warmup + args.repeats):
        request = {"llm": engine_options(args), "prompt": [PROMPT_ID] * args.input_lengths.low, "begun": time.time()}
        done = subprocess.run(
            [sys.executable, "-m", "inferplane.cli.verbs.bench.startup_process"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            if (refused := _parse_error(done.stdout)) is not None:
                raise refused
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise GenerationError(
                f"A process did not start the model: {lines[-1]}",
                remedy="run `inferplane generate` with the same options",
            )
        out.append(json.loads(done.stdout.splitlines()[-1]))
        on_done()
    return out


def _parse_error(output: str) -> InferplaneError | None:
    """The `InferplaneError` that a process wrote to its output, or None."""
    try:
        fields = json.loads(output.splitlines()[-1])["error"]
        kind: Any = getattr(errors, fields.pop("kind"), object)
        refused: InferplaneError | None = None
        if issubclass(kind, InferplaneError):
            refused = kind(fields.pop("what"), **fields)
        return refused
    except (IndexError, KeyError, TypeError, ValueError):
        return None
