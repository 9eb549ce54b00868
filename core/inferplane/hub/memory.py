"""Says before a download whether weights are too large for this machine, and which quantization fits."""

from __future__ import annotations

import os

from inferplane.hub.progress import format_size

SHARES = (("weight_only_int8", "half", 0.55), ("weight_only_int4", "a quarter", 0.3))
"""Quantization -> its part of the bytes of 16-bit weights, in words, and the part that it is taken to need here: scales
come on top, and embeddings stay as they are."""


def memory_bytes() -> int | None:
    """Bytes of this machine's memory; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def explain_memory(weights: int, memory: int | None, name: str) -> str:
    """A sentence if weights are too large for a machine's memory, with the quantization that fits; else empty.

    Args:
        weights: bytes of the files.
        memory: bytes of the machine; None: unknown.
        name: the model's.
    """
    if memory is None or weights < memory:
        return ""
    what = f"its weights, {format_size(weights)}, are more than this machine's memory, {format_size(memory)}"
    fitting = [(option, words) for option, words, share in SHARES if weights * share < memory]
    if not fitting:
        return f"{what}, and too many for it when quantized"
    option, words = fitting[0]
    how = f"--quantization {option} takes about {words} of what 16-bit weights take"
    return f"{what}; {how} (`inferplane estimate {name} --quantization {option}`)"
