"""Compiles grammars in a process of its own, which may hang or crash without harm. `GrammarSandbox` starts it.

llguidance bounds most of its work, but not all: some schemas of a kilobyte keep it busy for minutes, some overflow the
stack and end the process. So a grammar is compiled here first, on a small stack and with little memory; only if that
succeeds in time, and within `MAX_COMPILED_BYTES`, the engine's process compiles it, too.

Runs as a script, in isolation; imports nothing of Inferplane. Standard input: a line with the tokenizer, then a line
for each grammar; standard output: a line for each, the error or "". All lines are JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from typing import Any

STACK_BYTES = 4 * 2**20
MEMORY_BYTES = 4 * 2**30
"""Most address space of the process (`inferplane.confined`)."""
MAX_COMPILED_BYTES = 32 * 2**20
"""Most memory of a compiled constraint before its first token: an enum of 5,000 strings takes 1.4 MiB."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 65_536,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Arguments of `LLParserLimits` for every matcher. Nearly all are llguidance's defaults, stated here since they bound a
step: it names 14,000 units of a step's fuel and 20,000 items a millisecond. States bound a matcher's memory: its lexer
took 0.8 kB a state under `(.*a.{30}){30}` and less under ten other expressions (llguidance 1.9.1, by `mallinfo2`), so
64 MiB where its default of 250,000 allows 200; a string of at most 4,000 characters needs some 12,000 states.
"""


class _MallocStatistics(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _count_allocated() -> int:
    """Bytes that this process has allocated and not freed; 0 where the C library does not tell."""
    try:
        mallinfo = ctypes.CFUNCTYPE(_MallocStatistics)(("mallinfo2", ctypes.CDLL(None)))
    except (AttributeError, OSError, TypeError):  # not glibc 2.33 or newer
        return 0
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def _serve() -> None:
    """Read the tokenizer and then grammars from standard input; compile each and write its error, or ""."""
    lines = iter(sys.stdin)
    setup: dict[str, Any] = json.loads(next(lines))
    sys.path[:] = setup["path"]
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["ends"])
    limits = LLParserLimits(**LIMITS)
    print(json.dumps(""), flush=True)
    for line in lines:
        grammar = json.loads(line)
        before = _count_allocated()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error, taken = matcher.get_error(), _count_allocated() - before
        if not error and taken > MAX_COMPILED_BYTES:
            error = f"it takes {taken >> 20} MiB, more than {MAX_COMPILED_BYTES >> 20} MiB"
        del matcher  # its memory would count as free for the next one
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
