"""Reads the packed weights of one rank into a plan: bytes as they are, each checked, and nothing is packed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from inferplane.binding import Loaded, Plan
from inferplane.binding.load import assemble
from inferplane.errors import CheckpointError, KernelError, in_words
from inferplane.files import AGAIN
from inferplane.models.exported.checksum import as_bytes, checksum
from inferplane.models.exported.manifest import ANEW
from inferplane.models.exported.writer import LAYOUT
from inferplane.models.reading.file_reader import FileReader
from inferplane.models.reading.json_scanner import read_text
from inferplane.models.reading.safetensors_header import SUFFIX, Entry, read_header
from inferplane.ops.formats import FORMATS
from inferplane.types import CANONICAL, HOST, PLAIN, PackedStorage, Packing, QTensor, StoredWeight, Weight

MAX_LAYOUT_BYTES = 2**24
MAX_FILES = 4096


def _check_layout(layout: Any) -> list[str]:
    """The names of the files of a layout. Raises errors of any kind if it is none."""
    files: list[str] = layout["files"]
    if len(files) > MAX_FILES or any(Path(name).name != name or not name.endswith(SUFFIX) for name in files):
        raise ValueError("it names other files than those of its folder")
    if not all(type(number) is int and str(number) in layout["weights"] for number in layout["sites"].values()):
        raise ValueError("a weight is not there")
    for packings in layout["weights"].values():
        for entry in packings.values():
            for name, found in entry["tensors"].values():
                if not isinstance(name, str) or type(found) is not int:
                    raise ValueError("a tensor has no name or no checksum")
            if not isinstance(entry.get("facts", {}), dict):
                raise ValueError("a weight has no facts")
    return files


class _RankFiles:
    """The files of one rank.

    Raises:
        CheckpointError: they are damaged.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder = folder
        path = folder / LAYOUT
        text = read_text(path, MAX_LAYOUT_BYTES)
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise CheckpointError(f"{path} is not the one that was exported: its SHA-256 is another.", remedy=AGAIN)
        try:
            self.layout: dict[str, Any] = json.loads(text)
            files = _check_layout(self.layout)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no layout of an export: {error}.", remedy=AGAIN) from error
        self._entries: dict[str, Entry] = {}
        for name in files:
            self._entries |= read_header(folder / name)
        self._open: FileReader | None = None

    def number_of(self, weight: str) -> str | None:
        """The number under which a weight at a place of the model is stored; None: it is not."""
        found = self.layout["sites"].get(weight)
        return None if found is None else str(found)

    def read(self, number: str, label: str, storage: PackedStorage, device: str, seen: dict[str, Any]) -> StoredWeight:
        """What is stored of a weight in one packing. `seen` has the tensors of its other packings, by their names."""
        entry = self.layout["weights"][number][label]
        tensors = {}
        for field, (name, expected) in entry["tensors"].items():
            if name not in seen:
                seen[name] = self._read(name, expected, storage).to(device)
            tensors[field] = seen[name]
        return StoredWeight(tensors, entry.get("facts", {}))

    def _read(self, name: str, expected: int, storage: PackedStorage) -> torch.Tensor:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} lacks the tensor {name}.", remedy=AGAIN)
        if self._open is None or self._open.path != entry.path:
            self.close()
            self._open = FileReader(entry.path)
        if storage.allocate is None:
            out = torch.empty(entry.shape, dtype=entry.dtype)
        else:
            out = storage.allocate(entry.nbytes).view(entry.dtype).view(entry.shape)
        memory = as_bytes(out)
        if len(memory):
            self._open.read(entry.start, memory)
        if checksum(memory) != expected:
            raise CheckpointError(
                f"{entry.path} is damaged: the checksum of {name} is another than when it was exported.", remedy=AGAIN
            )
        return out

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def load_packed(
    plan: Plan,
    folder: Path,
    digest: str,
    device: str = HOST,
    progress: Callable[[int, int], None] | None = None,
    missing: Mapping[int, Mapping[str, Packing]] | None = None,
) -> Loaded:
    """Read every weight of a plan in every packing. Constants are made, as they depend on the start's options.

    Args:
        plan: lists the needed weights and their packings.
        folder: of the rank, as `RankWriter` wrote it.
        digest: SHA-256 of its layout.
        device: torch device of the packed weights.
        progress: called with the bytes read, and of all.
        missing: id of a weight -> the packings to read of it, by label; None: every weight in all packings of the plan.

    Raises:
        CheckpointError: a file is damaged, or a weight is not there as the plan needs it.
        KernelError: a packing raised.
    """
    files = _RankFiles(folder, digest)
    requested = plan.packings if missing is None else missing
    total = sum(plan.nbytes(plan.weights[i], name) for i, names in requested.items() for name in names)
    loaded = Loaded()
    sites: dict[int, str] = {}
    for site, weight in plan.model.weights():
        sites.setdefault(id(weight), site)
    try:
        for i, packings in requested.items():
            weight, seen = plan.weights[i], dict[str, Any]()
            for label, packing in packings.items():
                if weight.make is not None:
                    made = assemble(weight, _NoSource(), plan.settings.dtype, {})
                    assert isinstance(made, torch.Tensor)
                    loaded.packed[i, label] = packing.fn(made if device == HOST else made.to(device))
                else:
                    loaded.packed[i, label] = _read_weight(files, sites[i], weight, packing, plan, device, seen)
                loaded.nbytes += plan.nbytes(weight, label)
            if progress is not None:
                progress(loaded.nbytes, total)
    finally:
        files.close()
    return loaded


class _NoSource:
    """The source of weights that are made."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def _read_weight(
    files: _RankFiles, site: str, weight: Weight, packing: Packing, plan: Plan, device: str, seen: dict[str, Any]
) -> Any:
    number, label = files.number_of(site), packing.label
    if number is None or label not in files.layout["weights"].get(number, {}):
        raise CheckpointError(
            f"{files.folder} does not have {site} in packing {label!r}, which this start needs: its options, or its "
            "kernels, are others than those of the export.",
            remedy="start it with the options that it was exported with, or export the model again",
        )
    storage = packing.storage or PackedStorage.of_tensors("")
    try:
        packed = storage.read(files.read(number, label, storage, device, seen), weight.shape)
        if packing.name == CANONICAL.name:
            _check_canonical(packed, weight, packing, plan.settings.dtype)
    except CheckpointError:
        raise
    except Exception as error:
        raise KernelError(
            f"{files.folder}: {site} cannot be read in packing {label!r}: {in_words(error)}", remedy=ANEW
        ) from error
    return packed


def _check_canonical(packed: Any, weight: Weight, packing: Packing, dtype: torch.dtype) -> None:
    """Raise KernelError for another shape, dtype or format than the model has: kernels trust both."""
    if tuple(packed.shape) != weight.shape:
        raise KernelError(f"its shape is {tuple(packed.shape)}, the model's {weight.shape}.")
    is_plain = weight.format == PLAIN or packing.dequantized
    if isinstance(packed, QTensor):
        known = FORMATS.get(weight.format)
        right = not is_plain and (known is None or packed.data.dtype is known[0])
    else:
        right = is_plain and packed.dtype == (weight.dtype or dtype)
    if not right:
        raise KernelError(f"it is not in format {weight.format!r}.")
