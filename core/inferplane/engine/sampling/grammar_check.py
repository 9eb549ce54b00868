"""Compiles grammars in a process of its own, which may hang or crash without harm. `GrammarSandbox` starts it.

llguidance bounds most of its work, but not all: some schemas of a kilobyte keep it busy for minutes, some overflow the
stack and end the process. So a grammar is compiled here first, on a small stack and with little memory; only if that
succeeds in time, the engine's process compiles it, too.

Runs as a script, in isolation; imports nothing of Inferplane. Standard input: a line with the tokenizer, then a line
for each grammar; standard output: a line for each, the error or "". All lines are JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from typing import Any

STACK_BYTES = 4 * 2**20
MEMORY_BYTES = 4 * 2**30


def _limit_memory() -> None:
    """Limit this process to `MEMORY_BYTES` of address space, where the platform can."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # the time limit remains
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _serve() -> None:
    """Read the tokenizer and then grammars from standard input; compile each and write its error, or ""."""
    lines = iter(sys.stdin)
    setup: dict[str, Any] = json.loads(next(lines))
    sys.path[:] = setup["path"]
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["ends"])
    limits = LLParserLimits(verbose_errors=False)
    print(json.dumps(""), flush=True)
    for line in lines:
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    _limit_memory()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
