"""One start, from a new interpreter to the first token. Reads a JSON object and writes one: see `startup`."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Start a model and write the seconds of each phase, or the error that prevented it."""
    from inferplane.errors import InferplaneError

    try:
        _start()
    except InferplaneError as error:
        raised = {"kind": type(error).__name__, "what": error.what, "there_is": error.there_is, "remedy": error.remedy}
        sys.stdout.write("\n" + json.dumps({"error": raised}) + "\n")
        raise SystemExit(1) from None


def _start() -> None:
    entry = time.time()
    request_options = json.loads(sys.stdin.readline())
    phases = {"interpreter": max(0.0, entry - request_options["begun"])}
    begun = time.perf_counter()
    from inferplane.cli.verbs.bench.environment import environment
    from inferplane.engine import LLM, SamplingParams
    from inferplane.plugins import host

    phases["import"], begun = time.perf_counter() - begun, time.perf_counter()
    host().backend(request_options["llm"]["device"])
    phases["probe"], begun = time.perf_counter() - begun, time.perf_counter()
    llm = LLM(**request_options["llm"])
    opened = time.perf_counter() - begun
    phases |= llm.runner.spent_s
    phases["rest"] = max(0.0, opened - sum(llm.runner.spent_s.values()))
    begun = time.perf_counter()
    request = llm.engine.add(request_options["prompt"], SamplingParams(max_tokens=1, temperature=0), frozenset())
    while request.finish_reason is None:
        llm.engine.step()
    if request.finish_reason != "length":
        raise SystemExit(f"the first token failed: {request.error}")
    phases["first_token"] = time.perf_counter() - begun
    phases["total"] = time.time() - request_options["begun"]
    sys.stdout.write("\n" + json.dumps({"phases": phases, "environment": environment(llm)}) + "\n")


if __name__ == "__main__":
    main()
