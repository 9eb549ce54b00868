"""Reads the weights of a model's plan: the model's, and those of drafters with files or formats of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from inferplane.binding import DummySource, Loaded, Store, load
from inferplane.engine.runner.exports import compare
from inferplane.engine.runner.loading.drafters import Drafter
from inferplane.engine.runner.planned_model import PlannedModel
from inferplane.errors import CheckpointError, warn
from inferplane.models.exported import load_packed
from inferplane.models.reading.names import check_frequencies
from inferplane.quant import READERS, explain_no_savings, explain_requantized
from inferplane.types import Packing

Missing = Mapping[int, Mapping[str, Packing]]
"""Id of a weight -> packings by label."""
Progress = Callable[[int, int], None]


def read_weights(planned: PlannedModel, progress: Progress | None) -> Loaded:
    """Read every weight of a model's plan that is not packed in `planned.loaded`; returns all that are in the plan,
    with what is odd in the files as warnings.

    Raises:
        As `load`.
    """
    packed, drafters = planned.loaded.packed, planned.drafters
    missing = {
        i: {name: packing for name, packing in names.items() if (i, name) not in packed}
        for i, names in planned.plan.packings.items()
    }
    missing = {i: names for i, names in missing.items() if names}
    owned = [drafter.layers.own_weights(planned.base) for drafter in drafters]
    found = _load_model(planned, _without(missing, set().union(*owned)), progress)
    for drafter, ids in zip(drafters, owned):
        drafter.loaded = _load_drafter(planned, drafter, {i: names for i, names in missing.items() if i in ids})
        found.packed |= drafter.loaded.packed
    requested = {(i, name) for i, names in planned.plan.packings.items() for name in names}
    found.packed |= {key: value for key, value in packed.items() if key in requested}
    found.nbytes = planned.plan.weight_bytes
    return found


def _without(missing: Missing, ids: Collection[int]) -> Missing:
    return {i: names for i, names in missing.items() if i not in ids}


def pack_weights(planned: PlannedModel, progress: Progress | None, store: Store) -> Loaded:
    """Read and pack every weight of a plan, also those of layers that draft, and give each to `store`.

    Raises:
        As `load`.
    """
    packings = planned.plan.packings
    owned = [drafter.layers.own_weights(planned.base) for drafter in planned.drafters]
    found = _load_model(planned, _without(packings, set().union(*owned)), progress, store)
    for drafter, ids in zip(planned.drafters, owned):
        _load_drafter(planned, drafter, {i: names for i, names in packings.items() if i in ids}, store)
    return found


def describe_packings(planned: PlannedModel) -> dict[str, dict[str, Any]]:
    """The packings of the plan, their versions, and the kernels that read them (`exports.compare`)."""
    return compare.describe_packings(
        planned.plan, planned.kernels, lambda kernel: planned.host.origin(kernel, planned.backend)
    )


def _read_packed(planned: PlannedModel, missing: Missing, progress: Progress | None) -> Loaded:
    """Read weights of an export, which are packed."""
    exported, rank = planned.files.exported, planned.placement.tp_rank
    assert exported is not None
    needed = {label for names in missing.values() for label in names}
    packings = {label: entry["version"] for label, entry in describe_packings(planned).items() if label in needed}
    exported.check_packings(packings)
    folder, digest = exported.rank_folder(rank), exported.layouts[rank]
    return load_packed(planned.plan, folder, digest, planned.backend.torch_device_indexed, progress, missing)


def _load_model(
    planned: PlannedModel, missing: Missing, progress: Progress | None, store: Store | None = None
) -> Loaded:
    """Read weights from the model's files; a few of them where most are read already."""
    again = bool(planned.loaded.packed)
    if again and not missing:
        return Loaded()
    if planned.is_packed:
        for what in () if again else planned.files.complaints():
            warn(what)
        return _read_packed(planned, missing, progress)
    with contextlib.ExitStack() as opened:
        source = None if planned.options.load_format == "dummy" else planned.files.source()
        if source is not None:
            opened.enter_context(contextlib.closing(source))
        for what in () if again else planned.files.complaints():
            warn(what)
        found = load(
            planned.plan,
            DummySource() if source is None else planned.view(source),
            planned.backend.torch_device_indexed,
            readers=planned.readers,
            progress=progress,
            ignore=("*",) if again else planned.ignored,
            missing=missing,
            store=store,
        )
        if source is not None and not again:
            check_frequencies(planned.files.config, planned.files.source(), found.ignored)
    scheme, savings = planned.options.quantization, list[str]()
    if not again:
        savings += explain_no_savings(planned.plan, scheme, planned.read.schemes_instead)
        savings += explain_requantized(planned.requantized, scheme)
    for what in (*savings, *found.complaints(planned.files.name)):
        warn(what)
    return found


def _load_drafter(planned: PlannedModel, drafter: Drafter, missing: Missing, store: Store | None = None) -> Loaded:
    """Read the weights that layers that draft have of their own; of an export they are part."""
    if planned.is_packed and drafter.files is planned.files:
        return _read_packed(planned, missing, None) if missing else Loaded()
    with contextlib.ExitStack() as opened:
        source = None if planned.options.load_format == "dummy" else drafter.files.source()
        if source is not None:
            opened.enter_context(contextlib.closing(source))
        try:
            found = load(
                planned.plan,
                DummySource(1) if source is None else drafter.formats.view(source),
                planned.backend.torch_device_indexed,
                readers={**READERS, **drafter.formats.readers},
                ignore=drafter.layers.unread,
                missing=missing,
                store=store,
            )
        except CheckpointError as error:
            error.add_subject(f"What drafts, {drafter.files.name}")
            raise
    found.unused = [name for name in found.unused if name.startswith(drafter.prefixes)]
    for what in found.complaints(drafter.files.name):
        warn(what)
    return found
