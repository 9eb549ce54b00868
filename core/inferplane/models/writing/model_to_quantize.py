"""What a copy is made of: the model that is quantized, and what a calibration found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from inferplane.binding import TensorSource
from inferplane.models.reading.config import Config
from inferplane.types import QTensor


@dataclass(frozen=True)
class ModelToQuantize:
    """The model that is quantized.

    Args:
        name: as the user named it.
        config: its entries.
        source: its tensors.
        folder: with tokenizer, templates and licence; None: there is none.
        files: its weights' files, which are hashed.
        plugins: model families of plugins.
        changes: entries of the config that differ from those of the folder's file.
    """

    name: str
    config: Config
    source: TensorSource
    folder: Path | None = None
    files: Sequence[Path] = ()
    plugins: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


class Calibrated(Protocol):
    """What a calibration found: values of tensors, and what the model card says of it."""

    how: str
    paragraphs: Sequence[str]

    def names(self) -> Collection[str]:
        """Tensors that it has."""

    def quantized(self, name: str) -> QTensor | None:
        """A weight; None: it was not calibrated."""

    def plain(self, name: str) -> torch.Tensor | None:
        """A tensor that is not quantized; None: it did not change."""
