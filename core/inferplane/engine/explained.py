"""What `explain` tells of a runner: its plan, and which decode steps are recorded."""

from __future__ import annotations

from typing import Any

from inferplane.binding import explain, explain_text
from inferplane.engine.runner.buckets import sizes_for
from inferplane.engine.runner.capture import why_not, why_not_together
from inferplane.engine.runner.model_runner import Runner
from inferplane.types import Backend


def explained(runner: Runner) -> dict[str, Any]:
    """As data (docs/schemas/explain.json)."""
    return {**explain(runner.plan, runner.files.name), "decode_steps": captured_steps(runner)}


def explained_text(runner: Runner, *, verbose: bool = False) -> str:
    """As text, in the words of `inferplane explain`; of recorded steps it says nothing where there are none."""
    steps = captured_steps(runner)
    return explain_text(runner.plan, runner.files.name, verbose=verbose, decode_steps=steps)


def captured_steps(runner: Runner) -> dict[str, Any]:
    """For `explain`: the sizes of decode steps that are recorded, and `off`, why none are, in words. Where a layer of
    the model drafts, `drafting_layer` tells why its drafts are not in one record with the step; empty where they are.
    """
    sizes = sizes_for(runner.plan, runner.options, runner.max_model_len)
    off = why_not(runner.plan, runner.options)
    if runner.decode is not None:
        sizes, off = runner.decode.sizes, runner.decode.off
    if not off and type(runner.backend).capture is Backend.capture:
        off = "the device records no steps"
    told = {**sizes.data(), "off": off}
    if not runner.options.drafting_layer:
        return told
    apart = why_not_together(runner.plan, runner.options) if runner.cycles is None else runner.cycles.off
    return {**told, "drafting_layer": off or apart}
