"""The files of a model: a folder, a config, or the demo model that ships with Inferplane."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError, UsageError
from inferplane.models import Config, SafetensorsFolder, as_config

DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parents[2] / "models" / "demo"
SHIPPED = {DEMO: DEMO_FOLDER, "demo-draft": DEMO_FOLDER / "draft", "demo-eagle": DEMO_FOLDER / "eagle"}
"""Folders by short name: the demo model, and a draft model and an EAGLE head for it."""


class ModelFiles:
    """A model's config, and its folder if it has one.

    Args:
        model: "demo" or another name of `SHIPPED`, a folder in the Hugging Face layout, a mapping with a config's
            entries, or a transformers config.

    Raises:
        UsageError: no such folder.
        CheckpointError: the folder lacks a readable config.
    """

    def __init__(self, model: Any) -> None:
        self.folder: Path | None = None
        if isinstance(model, (str, Path)):
            self.name = str(model)
            self.folder = SHIPPED.get(str(model)) or Path(model).expanduser()
            if not self.folder.is_dir():
                if model in SHIPPED:
                    tool = "train_demo.py" if model == DEMO else "train_drafts.py"
                    raise CheckpointError(
                        f"Model {model!r} is not part of this installation.",
                        remedy=f"train it with tools/{tool}, or load another model",
                    )
                raise UsageError(
                    f"Model {self.name!r} is no folder.",
                    there_is="'demo', which ships with Inferplane, and folders in the Hugging Face layout",
                    remedy="fetch the model's files first and pass their folder",
                )
            self.config = Config.read(self.folder)
        else:
            self.config = as_config(model)
            self.name = self.config.architecture
        self._source: SafetensorsFolder | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the folder holds weights, also pickled ones (which are then refused by name)."""
        return (self.folder is not None and any(self.folder.glob("*.safetensors*"))) or self._pickled()

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds a tokenizer's files."""
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        return self.folder is not None and any((self.folder / name).exists() for name in names)

    def _pickled(self) -> bool:
        """Whether the folder holds weights in pickled files, which are never read."""
        return self.folder is not None and any(p.suffix in (".bin", ".pt", ".pth") for p in self.folder.iterdir())

    def source(self) -> SafetensorsFolder:
        """The checkpoint's tensors, to be read by name; opened, and their headers read, at the first call.

        Raises:
            CheckpointError: there are none, or they are damaged.
        """
        if self.folder is None:
            raise CheckpointError(
                f"{self.name} was given as a config without weights.",
                remedy='pass load_format="dummy" for random weights, or a folder with weights',
            )
        if self._source is None:
            self._source = SafetensorsFolder(self.folder)
        return self._source

    def complaints(self) -> tuple[str, ...]:
        """Warnings about the tensors' files, a sentence each; none before `source` has opened them."""
        return () if self._source is None else self._source.complaints

    def names(self) -> Iterable[str]:
        """Names of the checkpoint's tensors; opens the files if need be."""
        return self.source().names()
