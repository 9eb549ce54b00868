"""What an exported model was made for: `export.json`, which is compared with a start before any weight is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError, UsageError
from inferplane.files import AGAIN
from inferplane.models.reading.json_object import read_object

MANIFEST = "export.json"
SCHEMA = 1
MAX_MANIFEST_BYTES = 2**24
"""The names of the tensors of a quantized checkpoint with many experts take most of it."""
MAX_RANKS = 4096
ANEW = "export the model again for this device and this release (`inferplane export`)"
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("inferplane", "device", "arch", "dtype", "packing_hash"), (str,)),
    **dict.fromkeys(("quantization", "draft_quantization"), (str, type(None))),
    **dict.fromkeys(("features", "packings"), (dict,)),
    **dict.fromkeys(("layouts", "rank_bytes"), (list,)),
    "names": (list, type(None)),
    "kv_scales": (dict, type(None)),
}
_LATER: dict[str, Any] = {"draft_quantization": None, "kv_scales": None}
"""Entries that exports of earlier releases lack, and what these mean by it."""


@dataclass(frozen=True)
class Manifest:
    """What an exported model was made for.

    Args:
        inferplane: the release that wrote it.
        device: the backend's name.
        arch: the device's architecture.
        features: the device's features, and whether it had them.
        dtype: of the activations.
        quantization: the scheme by which the checkpoint was quantized; None: it was not.
        packings: label of each packing -> its version, and the kernels that read it.
        packing_hash: of all packings and their versions (`hash_packings`).
        layouts: SHA-256 of the layout of each rank.
        rank_bytes: bytes of the packed weights of each rank.
        draft_quantization: that of the prediction layers; None: the same as of the model.
        names: the checkpoint's tensors, by which a quantized checkpoint is understood; None: it was not quantized.
        kv_scales: calibrated scales of the KV cache: "dtype", and "layers", the scales of K and V by layer; None: the
            checkpoint has none.
        folder: where it was read from; "" before it is written.
    """

    inferplane: str
    device: str
    arch: str
    features: dict[str, bool | None]
    dtype: str
    quantization: str | None
    packings: dict[str, dict[str, Any]]
    packing_hash: str
    layouts: list[str] = field(default_factory=list)
    rank_bytes: list[int] = field(default_factory=list)
    names: list[str] | None = None
    draft_quantization: str | None = None
    kv_scales: dict[str, Any] | None = None
    folder: str = ""

    @property
    def ranks(self) -> int:
        """The number of processes that share the model."""
        return len(self.layouts)

    def rank_folder(self, rank: int) -> Path:
        """The folder with the weights of one rank."""
        return Path(self.folder) / f"rank_{rank}"

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        content = {"schema": SCHEMA, "ranks": self.ranks, **asdict(self)}
        del content["folder"]
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in a folder; None: the folder is no export.

        Raises:
            CheckpointError: it is damaged, or of another schema.
        """
        path = folder / MANIFEST
        if not os.path.lexists(path):
            return None
        content = {**_LATER, **read_object(path, MAX_MANIFEST_BYTES)}
        if content.get("schema") != SCHEMA:
            release = content.get("inferplane")
            maker = f", made by inferplane {release}" if isinstance(release, str) else ""
            raise CheckpointError(
                f"{folder} is an export of schema {content.get('schema')!r}{maker}.",
                there_is=f"schema {SCHEMA}",
                remedy=ANEW,
            )
        for key, kinds in _KINDS.items():
            if key not in content or not isinstance(content[key], kinds):
                raise CheckpointError(f"{path}: {key!r} is missing or of another kind.", remedy=AGAIN)
        made = cls(**{f.name: content[f.name] for f in fields(cls) if f.name != "folder"}, folder=str(folder))
        made._check_entries(path, content.get("ranks"))
        return made

    def _check_entries(self, path: Path, ranks: Any) -> None:
        right = 0 < len(self.layouts) == len(self.rank_bytes) == ranks <= MAX_RANKS
        right = right and all(isinstance(x, str) for x in (*self.layouts, *(self.names or ())))
        right = right and all(isinstance(x, dict) and isinstance(x.get("version"), str) for x in self.packings.values())
        right = right and all(type(x) is int for x in self.rank_bytes)
        if not right or hash_packings({k: x["version"] for k, x in self.packings.items()}) != self.packing_hash:
            raise CheckpointError(f"{path} contradicts itself.", remedy=AGAIN)

    # -- compared with a start

    def check_device(self, device: str) -> None:
        """Raise UsageError for another kind of device than it was made for."""
        if device != self.device:
            raise UsageError(
                f"{self.folder} is an export for device {self.device!r}; this is {device!r}.",
                remedy=f"pass device {self.device!r}, or export the model for {device!r}",
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise UsageError for another number of processes than it was made for."""
        if ranks != self.ranks:
            launch = f"start it on {self.ranks} devices (`torchrun --nproc-per-node {self.ranks}`)"
            raise UsageError(
                f"{self.folder} is an export for {self.ranks} device(s) that share the model; these are {ranks}.",
                remedy=f"{launch}, or export it with --tensor-parallel-size {ranks}",
            )

    def check_hardware(self, arch: str, features: Mapping[str, bool | None]) -> None:
        """Raise UsageError for another architecture or other features than those it was made for."""
        what = [] if arch == self.arch else [f"architecture {self.arch!r} there, {arch!r} here"]
        words = {True: "present", False: "absent", None: "unknown"}
        for name in sorted({*features, *self.features}):
            there, here = self.features.get(name), features.get(name)
            if there != here:
                what.append(f"feature {name!r} {words.get(there, 'unknown')} there, {words[here]} here")
        if what:
            raise UsageError(
                f"{self.folder} was exported on another kind of {self.device}: {'; '.join(what)}.", remedy=ANEW
            )

    def check_packings(self, versions: Mapping[str, str]) -> None:
        """Raise UsageError if the start needs packings, by label with their versions, that it has not or has of another
        version."""
        lacking = sorted(label for label in versions if label not in self.packings)
        if lacking:
            raise UsageError(
                f"{self.folder} has no weights in packing {', '.join(map(repr, lacking))}, which this start needs: its "
                "options, or its kernels, are others than those of the export.",
                there_is=", ".join(map(repr, sorted(self.packings))),
                remedy="start it with the options that it was exported with, or export the model again",
            )
        for label, version in versions.items():
            if (there := self.packings[label]["version"]) != version:
                raise UsageError(
                    f"{self.folder}, exported by inferplane {self.inferplane}, has packing {label!r} in version "
                    f"{there!r}; the kernels here read version {version!r}.",
                    remedy=ANEW,
                )


def hash_packings(versions: Mapping[str, str]) -> str:
    """SHA-256 of packings and their versions, in hexadecimal digits."""
    lines: Iterable[str] = (f"{label}\0{version}\n" for label, version in sorted(versions.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
