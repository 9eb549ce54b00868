"""Compares an export with the start that reads it: options, device, ranks and packings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from inferplane.binding import Plan
from inferplane.engine.runner.options import AS_STORED, SPELLINGS, RunnerOptions
from inferplane.errors import UsageError
from inferplane.models.exported import Manifest
from inferplane.types import DeviceState, Kernel


def settle_options(options: RunnerOptions, exported: Manifest, device: str) -> RunnerOptions:
    """The options with the dtype and quantizations of an export, which they may repeat.

    Args:
        options: of a start.
        exported: the model.
        device: the backend's name.

    Raises:
        UsageError: they state others, or it is an export for another device.
    """
    exported.check_device(device)
    requested = str(options.dtype).removeprefix("torch.")
    requested = SPELLINGS.get(requested, requested)
    for name, mine, theirs in (
        ("dtype", None if requested == "auto" else requested, exported.dtype),
        ("quantization", options.quantization, exported.quantization),
    ):
        if mine is not None and mine != theirs:
            raise UsageError(
                f"{name} = {mine!r}, but {exported.folder} was exported with {theirs!r}.",
                remedy=f"leave {name} out, or export the model with it",
            )
    options = replace(options, dtype=exported.dtype, quantization=exported.quantization)
    if not options.mtp or options.mtp_files is not None:
        return options
    theirs = exported.draft_quantization or exported.quantization or AS_STORED
    if options.draft_quantization not in (None, theirs):
        raise UsageError(
            f"draft_quantization = {options.draft_quantization!r}, but the prediction layers of {exported.folder} were "
            f"exported with {theirs!r}.",
            remedy="leave draft_quantization out, or export the model with it",
        )
    return replace(options, draft_quantization=exported.draft_quantization)


def check_export(exported: Manifest, options: RunnerOptions, ranks: int, state: DeviceState | None) -> None:
    """Raise UsageError if a model is an export for another device or number of ranks than those of a start.

    Args:
        exported: the model.
        options: of the start.
        ranks: number of processes that share the model.
        state: the opened device; None: it is not here.
    """
    exported.check_ranks(ranks)
    if state is not None and options.arch is None:
        exported.check_hardware(state.arch, {name: f.present for name, f in state.features.items()})
    if options.eagle is not None:
        raise UsageError(
            f"An EAGLE head with {exported.folder}, which is an export, is not implemented.",
            there_is="drafting by n-grams, by MTP layers that are part of the export, and by a draft model",
            remedy="choose one of these, or load the model that it was made from",
        )


def describe_packings(
    plan: Plan, kernels: Iterable[Kernel], origin: Callable[[Kernel], str]
) -> dict[str, dict[str, Any]]:
    """The packings of a plan by their labels, each with its version and the kernels that read it. Where its author
    states no version, the plugin's and torch's stand for it.

    Args:
        plan: the plan.
        kernels: of the device.
        origin: a kernel -> the distribution and version that it comes from.
    """
    named = {kernel.name: kernel for kernel in kernels}
    found: dict[str, dict[str, Any]] = {}
    for i, packings in plan.packings.items():
        if plan.weights[i].make is not None:
            continue
        for label, packing in packings.items():
            entry = found.setdefault(label, {"version": "", "kernels": []})
            users = {user.rpartition(" ")[2] for user in plan.users[i][label]} & named.keys()
            entry["kernels"] = sorted({*entry["kernels"], *users})
            if packing.storage is not None:
                entry["version"] = packing.storage.version
            else:
                origins = {origin(named[name]) for name in users}
                entry["version"] = f"{', '.join(sorted(origins))}; torch {torch.__version__}"
    return found
