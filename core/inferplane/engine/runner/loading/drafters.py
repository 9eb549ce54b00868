"""Draft layers with files or weight formats of their own (MTP, EAGLE): found, checked, built and loaded by themselves.

The model's weights are not touched: layers that draft read its embedding, its output head and its rotary tables, and
have everything else from their own files, in their own formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from inferplane.binding import Loaded, TensorSource
from inferplane.engine.runner.loading.device_model import DeviceModel
from inferplane.engine.runner.loading.weight_formats import build_as_read, find_formats, formats_read_by_row
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import AS_STORED
from inferplane.errors import warn
from inferplane.models import Build
from inferplane.models.draft_layers import DraftLayers
from inferplane.models.families import mtp
from inferplane.models.families.eagle import eagle_head
from inferplane.ops import CausalLM
from inferplane.quant import QuantFormats, takes_as_stored
from inferplane.types import PLAIN, Shard

PIECE_BYTES = 2**26
"""Bytes of a tensor that are compared at a time."""


@dataclass
class Drafter:
    """Layers that draft, their files, and their weights once they are read.

    Args:
        method: "mtp" or "eagle".
        files: that the layers' own weights are read from.
        quantization: scheme by which these are quantized while they are read; None: they stay as stored.
        formats: their formats.
        layers: the ops.
        prefixes: what names of the layers' tensors begin with; others in the files are not the layers'.
    """

    method: str
    files: ModelFiles
    quantization: str | None
    formats: QuantFormats
    layers: DraftLayers
    prefixes: tuple[str, ...] = ("",)
    loaded: Loaded = field(default_factory=Loaded)

    def data(self) -> dict[str, Any]:
        """What they are, as JSON-ready data."""
        shared = {what: "own" if what in self.layers.copies else "model" for what in mtp.COPIES}
        return {"method": self.method, "model": self.files.name, "quantization": self.quantization, **shared}


def choose_quantization(
    requested: str | None, of_model: str | None, files: ModelFiles, *, own_files: bool
) -> str | None:
    """The scheme by which a drafter's weights are quantized while they are read; None: they stay as stored.

    Args:
        requested: `draft_quantization`: a scheme, `AS_STORED`, or None for the default, which is the model's scheme
            unless the drafter has files of its own that are quantized already, or are an export.
        of_model: the model's scheme.
        files: the drafter's.
        own_files: whether these are other files than the model's.
    """
    if requested is not None:
        return None if requested == AS_STORED else requested
    has_own = own_files and (files.config.get("quantization_config") or files.exported is not None)
    return None if has_own else of_model


def build_drafters(planned: DeviceModel, model: CausalLM, *, apart: bool) -> list[Drafter]:
    """The layers that draft for a model and are not part of it, as its options name them.

    Args:
        planned: the model's options, files and device.
        model: that they draft for.
        apart: whether prediction layers are among them; else the model was built with them.

    Raises:
        UsageError: files lack the layers, these belong to another model, or a scheme is unknown.
        CheckpointError: files are no EAGLE head.
    """
    options, found = planned.options, []
    if options.mtp and not apart:
        mtp.check_stored(model, planned.names_in(planned.files), planned.files.name)
    if options.mtp and apart:
        found.append(_build_mtp(planned, model, options.mtp_files or planned.files))
    if options.eagle is not None:
        found.append(_build_eagle(planned, model, options.eagle))
    return found


def _build_mtp(planned: DeviceModel, model: CausalLM, files: ModelFiles) -> Drafter:
    """The prediction layers in `files`, which may be the model's own."""
    options, names, own_files = planned.options, planned.names_in(files), files is not planned.files
    config = files.config if own_files else planned.config
    if own_files:
        mtp.check_match(planned.config, config, files.name)
    stored = mtp.find_layers(planned.config, config, names, files.name)
    if own_files:
        config = mtp.join_configs(planned.config, config, stored)
    requested, of_model = options.draft_quantization, options.quantization
    scheme = choose_quantization(requested, of_model, files, own_files=own_files)
    found = find_formats(planned, config, scheme, names)
    copies = _find_copies(planned, files, stored, found) if own_files else {}
    renamed = {mtp.COPIES[what][0]: name for what, name in copies.items()}

    quantized = scheme is not None and not takes_as_stored(scheme, config)

    def make(found: QuantFormats) -> DraftLayers:
        def format_of(name: str) -> str:
            # Schemes go by the model's names, formats of files by the names in them.
            by_scheme = found.format_of(name) if quantized else PLAIN
            return found.format_of(renamed.get(name) or stored.find_name(name)) if by_scheme == PLAIN else by_scheme

        place, positions, rows = planned.placement, planned.max_model_len, formats_read_by_row(planned)
        build = Build(config, place, format_of, positions, True, [], found.activation_quants, rows)
        build = replace(build, rotates_index_keys=planned.options.has_quantized_index_keys)
        return mtp.mtp_layers(model, build, stored, copies, planned.host.models())

    layers, read = build_as_read(planned, config, scheme, names, make, lambda made: made.layers)
    prefixes, unread = stored.list_prefixes(), read.formats.unread
    return Drafter("mtp", files, scheme, read.formats, replace(layers, unread=(*layers.unread, *unread)), prefixes)


def _build_eagle(planned: DeviceModel, model: CausalLM, files: ModelFiles) -> Drafter:
    """The EAGLE head in `files`."""
    options, names, place = planned.options, planned.names_in(files), planned.placement
    scheme = choose_quantization(options.draft_quantization, options.quantization, files, own_files=True)

    def make(found: QuantFormats) -> DraftLayers:
        unread, quants = list(found.unread), found.activation_quants
        build = Build(files.config, place, found.format_of, planned.max_model_len, False, unread, quants)
        return eagle_head(model, build, names)

    layers, read = build_as_read(planned, files.config, scheme, names, make, lambda made: made.layers)
    return Drafter("eagle", files, scheme, read.formats, layers)


OWN = DraftLayers((), copies=tuple(mtp.COPIES))
"""Of a model that shares nothing with that for which it drafts."""
WORDS = {"embedding": "an embedding", "head": "an output head"}


def _find_copies(
    planned: DeviceModel, files: ModelFiles, stored: mtp.StoredLayers, found: QuantFormats
) -> dict[str, str]:
    """Copies of the model's embedding and head that are read because they differ from the model's, with a warning:
    "embedding" and "head" -> name. Those that are equal, and all where nothing is read, are the model's.
    """
    names = planned.names_in(files)
    if planned.state is None or names is None or planned.names_in(planned.files) is None:
        return {}
    copies = {}
    for what, name in stored.find_copies(names).items():
        is_plain = found.format_of(name) == PLAIN
        if is_plain and is_equal(files.source(), name, planned.files.source(), mtp.COPIES[what][0]):
            continue
        copies[what] = name
        warn(
            f"{files.name} has {WORDS[what]} of its own ({name}), which differs from the model's: its layers draft "
            "with it, and it takes memory beside the model's."
        )
    return copies


def is_equal(source: TensorSource, name: str, other: TensorSource, other_name: str) -> bool:
    """Whether two stored tensors have the same shape and values; read in pieces."""
    shape = source.shape(name)
    if shape is None or shape != other.shape(other_name):
        return False
    rows, row_bytes = shape[0], 4 * max(1, torch.Size(shape[1:]).numel())
    requested = max(1, rows * row_bytes // PIECE_BYTES)
    pieces = next((n for n in range(requested, 4 * requested) if rows % n == 0), 1)
    left, right = (torch.empty(rows // pieces, *shape[1:]) for _ in range(2))
    for i in range(pieces):
        shard = Shard(0, i, pieces)
        source.read_into(name, left, shard)
        other.read_into(other_name, right, shard)
        if not torch.equal(left, right):
            return False
    return True
