"""Judges a model before its weights are downloaded, in a process of its own: that of a server does not import torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.engine.clients.process.child import plain_arguments
from inferplane.engine.clients.process.messages import Fault
from inferplane.errors import InferplaneError

_START = """import sys
sys.path[:] = sys.argv[1].split("\\n")
from inferplane.engine.clients.process.download_check import main
main()
"""


def check_in_process(path: Path, *, model: str, options: Mapping[str, Any], ranks: int | None = None) -> None:
    """Refuse a model whose architecture is not known, or whose weights are too large, as opening it would.

    Args:
        path: the folder of its configs, or a GGUF file that has its header alone.
        model: the name that errors have.
        options: as for `LLM`.
        ranks: number of processes that will share the model; None: as many as a launcher has started.

    Raises:
        InferplaneError: as `check_before_download`. If the process fails otherwise, nothing is raised: the engine's
            own finds the same fault later.
    """
    message = {"path": str(path), "model": model, "options": plain_arguments(model, options)[1], "ranks": ranks}
    command = [sys.executable, "-c", _START, "\n".join(sys.path)]
    done = subprocess.run(command, input=json.dumps(message), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0 and (answer := json.loads(done.stdout)) is not None:
        raise Fault(*answer).error()


def main() -> None:
    """Read the message from standard input, and print null or the error's parts."""
    message = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # plugins may print
        warnings.simplefilter("ignore")  # the engine's process gives them again
        fault = _find_fault(Path(message["path"]), message["model"], message["options"], message["ranks"])
    print(json.dumps(fault and [fault.kind, fault.what, fault.there_is, fault.remedy]))


def _find_fault(path: Path, model: str, options: Mapping[str, Any], ranks: int | None) -> Fault | None:
    from inferplane.engine.clients.options import EngineOptions
    from inferplane.engine.runner.model_runner import check_before_download
    from inferplane.engine.runner.ranks import num_ranks
    from inferplane.plugins import host

    chosen = EngineOptions.of(options)
    runner_options = chosen.runner_options(ranks or num_ranks(chosen.tensor_parallel_size))
    try:
        check_before_download(
            path, model=model, host=host(), device=chosen.device, options=runner_options, index=chosen.index
        )
    except InferplaneError as error:
        return Fault.of(error)
    return None
