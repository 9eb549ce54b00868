"""A GGUF model whose headers are read: its metadata, config and tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from inferplane.errors import CheckpointError, UsageError, first_of
from inferplane.files import AGAIN
from inferplane.gguf.architecture import DERIVED, make_config
from inferplane.gguf.derived import derive
from inferplane.gguf.header import MAGIC, MAX_NUMBERS_BYTES, GGUFHeader, TensorEntry, find_ranges
from inferplane.gguf.metadata import Metadata
from inferplane.gguf.shards import open_model
from inferplane.hub.gguf_files import SUFFIX, group_files

_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def find_file(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only model in a folder without a config; None if it names none.

    Raises:
        UsageError: a folder holds several, and nothing else.
    """
    if path.is_file():
        if path.suffix == SUFFIX:
            return path
        try:
            with open(path, "rb") as file:
                return path if file.read(4) == MAGIC else None
        except OSError:
            return None
    if not path.is_dir() or (path / "config.json").exists() or any(path.glob("*.safetensors*")):
        return None
    names = sorted(entry.name for entry in path.glob(f"*{SUFFIX}"))
    models = [files[0] for files in group_files(names).values()] or names
    if len(models) > 1:
        raise UsageError(
            f"{path} holds {len(models)} GGUF models: {first_of(models)}.", remedy="pass one of these files"
        )
    return path / models[0] if models else None


def find_planned_ranges(beginning: bytes, size: int) -> list[tuple[int, int]] | None:
    """Which bytes of a file a plan of its model reads: see `find_ranges`."""
    return find_ranges(beginning, size, DERIVED)


@dataclass(frozen=True)
class GGUFModel:
    """A model in GGUF files.

    Args:
        path: its file, or one of its shards.
        header: of all its files.
    """

    path: Path
    header: GGUFHeader

    @classmethod
    def open(cls, path: Path) -> GGUFModel:
        """Read the headers.

        Raises:
            CheckpointError: a file is damaged, or shards are missing. UsageError: it holds no language model.
        """
        return cls(path, open_model(path))

    @cached_property
    def meta(self) -> Metadata:
        """The metadata."""
        shapes = {name: entry.shape for name, entry in self.header.tensors.items()}
        return Metadata(self.header.metadata, str(self.path), shapes, self._read_numbers)

    @cached_property
    def entries(self) -> dict[str, Any]:
        """The entries of the model's config.

        Raises:
            CheckpointError: the metadata lack an entry, or have something else for it.
            UnsupportedModelError: the architecture, or a setting, is not known.
        """
        return {**make_config(self.meta), "torch_dtype": self._dtype()}

    def derive_folder(self) -> Path:
        """A folder with config.json and the tokenizer's files; see `derive`."""
        return derive(self.path, self.header.metadata, self.entries)

    @cached_property
    def is_packed(self) -> bool:
        """Whether most bytes of the matrices are in blocks of quantized numbers."""
        return self._main_type() not in ("F32", *_DTYPES)

    def _main_type(self) -> str:
        """The type that most bytes of the matrices have."""
        sizes: Counter[str] = Counter()
        for entry in self.header.tensors.values():
            if len(entry.shape) > 1:
                sizes[entry.type.name] += entry.nbytes
        return max(sizes, key=lambda name: sizes[name], default="F32")

    def _dtype(self) -> str:
        """The dtype to compute in: that of the matrices, or bfloat16 if most are packed."""
        return "bfloat16" if self.is_packed else _DTYPES.get(self._main_type(), "float32")

    def _read_numbers(self, name: str) -> list[float]:
        """The values of a small float32 tensor."""
        entry: TensorEntry = self.header.tensors[name]
        if entry.type.name != "F32" or entry.nbytes > MAX_NUMBERS_BYTES:
            raise CheckpointError(f"{self.path}: tensor {name!r} is no short list of float32 numbers.", remedy=AGAIN)
        with open(entry.path, "rb") as file:
            file.seek(entry.start)
            return [float(number) for number in np.frombuffer(file.read(entry.nbytes), "<f4")]
