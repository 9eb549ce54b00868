"""What every process of the server does before it serves. Nothing heavy is imported here."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

from inferplane.engine import AsyncLLM
from inferplane.engine.clients.process.memory import freeze_gc

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the server."""


def import_tokenizers() -> None:
    """Import what every kind of tokenizer needs; it takes as long as all other imports together.

    Call it when the process's own imports are done: threads that import the same packages at the same time can block
    each other.
    """
    with contextlib.suppress(ImportError):  # reported when a tokenizer is used
        from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast


def open_engine(opener: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Wait for an engine, then exclude all objects that exist by now from garbage collection: they stay to the end."""
    engine = opener()
    freeze_gc()
    return engine
