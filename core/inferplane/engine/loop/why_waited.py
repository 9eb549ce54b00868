"""Whether and why steps wait for each other under asynchronous scheduling: what `explain` and the metrics say."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from inferplane.engine.loop.metrics import Metrics
from inferplane.errors import in_words, warn
from inferplane.types import Backend

REASONS = {
    "speculation": "the number of accepted drafts decides positions, on the host",
    "pooling": "an embedding is pooled on the host",
    "states": "the states at a block's end are to be found by their prefix",
    "failure": "a step failed, and its sequences run again",
    "blocks": "too few blocks are free, so a sequence may have to be preempted",
}
"""Why a step waits for the one before, by the name under which it is counted."""
ALONE = ("speculation", "pooling", "states", "failure")
"""Reasons for which the step itself is waited for before anything else is scheduled."""


def why_not_overlapped(backend: Backend, setting: str) -> str:
    """In words, why no step is prepared while another one runs; empty if steps are.

    Args:
        backend: of the device.
        setting: `async_scheduling`: "auto", "on" or "off".
    """
    if setting == "off":
        return "async_scheduling='off'"
    if setting == "auto" and not backend.asynchronous:
        return f"device {backend.name!r} runs each step while the host waits"
    try:
        backend.start_read([torch.zeros(1, dtype=torch.int64, device=backend.torch_device_indexed)])()
    except Exception as error:
        reason = f"device {backend.name!r} cannot be read behind a step: {in_words(error)}"
        warn(f"Every step is waited for before the next one is scheduled: {reason}.")
        return reason
    return ""


class Overlapping(Protocol):
    """What is described of the engine."""

    metrics: Metrics
    why_not_overlapped: str


def describe_overlap(loop: Overlapping) -> dict[str, Any]:
    """The `async_scheduling` of `explain`: why it is `off`, in words ("": it is not), how many steps were launched
    while another one ran, and how many waited.
    """
    metrics = loop.metrics
    waits = [{"reason": why, "words": REASONS[why], "steps": n} for why, n in sorted(metrics.waits.items())]
    overlapped = metrics.counters["overlapped_steps_total"]
    return {"off": loop.why_not_overlapped, "overlapped_steps": overlapped, "waits": waits}


def describe_overlap_in_words(loop: Overlapping) -> str:
    """`describe_overlap` as a line of text."""
    data = describe_overlap(loop)
    if data["off"]:
        return f"asynchronous scheduling: off, {data['off']}"
    waits = "".join(f"; {w['steps']} waited: {w['words']}" for w in data["waits"])
    return f"asynchronous scheduling: on, {data['overlapped_steps']} steps launched while another one ran{waits}"
