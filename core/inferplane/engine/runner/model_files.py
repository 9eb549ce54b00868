"""The files of a model: a folder, a config, or the demo model that ships with Inferplane."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError, UsageError
from inferplane.gguf.opened import GGUFModel, find_file, find_planned_ranges
from inferplane.hub import FORMS, locate, near_short_names, parse_name
from inferplane.hub.paddle_files import is_paddle_file, refuse_paddle_files
from inferplane.hub.repository import has_vocabulary
from inferplane.models import Config, SafetensorsFolder, as_config, constructor, settle_architecture
from inferplane.models.exported import Manifest
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.models.reading.names import canonical_names, settle_head
from inferplane.models.reading.normalize import complaints
from inferplane.models.reading.shipped_configs import PREFIX, read_shipped_config
from inferplane.plugins import host
from inferplane.quant import settle_order

LOCK = "lock.json"
DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parents[2] / "models" / "demo"
SHIPPED = {DEMO: DEMO_FOLDER, "demo-draft": DEMO_FOLDER / "draft", "demo-eagle": DEMO_FOLDER / "eagle"}
"""Folders by short name: the demo model, and a draft model and an EAGLE head for it."""

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.*|ollama:.*")


def check_architecture(folder: Path) -> None:
    """Refuse a model whose architecture is not known, by its config: before weights are downloaded.

    Raises:
        UnsupportedModelError: no model family has it. CheckpointError: the config cannot be read.
    """
    plugins = host().models()
    constructor(settle_architecture(Config.read(folder), plugins).architecture, plugins)


class ModelFiles:
    """A model's config, and its folder if it has one. That of a GGUF file holds what is derived from it: its config,
    and its tokenizer's files.

    Attributes: `name`; `config`; `exported`, what an exported model was made for, None for others.

    Args:
        model: "demo" or another name of `SHIPPED`, a folder in the Hugging Face layout, a GGUF file or its first shard,
            a name on a hub (a string), `config:NAME` (a config that ships with Inferplane, without weights), a
            mapping with a config's entries, or a transformers config.
        configs: of a name on a hub only the config is downloaded, if it is not in the cache.
        check: called with the folder of a name's configs, or a GGUF file with its header alone, before weights are
            downloaded; may raise.

    Raises:
        UsageError: no such folder, and no such model on a hub.
        CheckpointError: the folder lacks a readable config.
        DownloadError: the hub cannot be reached or refuses. CapacityError: the disk is too small.
    """

    def __init__(self, model: Any, *, configs: bool = False, check: Callable[[Path], None] | None = None) -> None:
        self._folder: Path | None = None
        self._gguf: GGUFModel | None = None
        self._source: SafetensorsFolder | GGUFSource | None = None
        self.exported: Manifest | None = None
        if isinstance(model, str) and model.startswith(PREFIX):
            self.config, self.name = settle_architecture(read_shipped_config(model), host().models()), model
        elif isinstance(model, (str, Path)):
            self.name = str(model)
            path = SHIPPED.get(str(model)) or Path(model).expanduser()
            if isinstance(model, str) and not path.exists() and (name := parse_name(model)):
                path = locate(name, configs=configs, check=check, find_ranges=find_planned_ranges).path
            if (file := find_file(path)) is not None:
                self._gguf = GGUFModel.open(file)
                self.config = Config(self._gguf.entries, str(file))
                self._source = GGUFSource(
                    self._gguf.header, self._gguf.meta, partial(canonical_names, config=self.config)
                )
                if (packed := self._source.quantization()) is not None:
                    self.config["quantization_config"] = packed
                return
            self._folder = path
            if path.is_file() and (refused := refuse_paddle_files(self.name, [path.name])) is not None:
                raise refused
            if not path.is_dir():
                if model in SHIPPED:
                    tool = "train_demo.py" if model == DEMO else "train_drafts.py"
                    raise CheckpointError(
                        f"Model {model!r} is not part of this installation.",
                        remedy=f"train it with tools/demo/{tool}, or load another model",
                    )
                raise UsageError(
                    f"Model {self.name!r} is no folder{_what_it_is(self.name, path)}.",
                    there_is=f"'demo', which ships with Inferplane; {FORMS}",
                    remedy=_how_to_get_a_folder(self.name, path),
                )
            self.exported = Manifest.read(path)
            self.config = settle_architecture(Config.read(path), host().models())
        else:
            self.config = settle_architecture(as_config(model), host().models())
            self.name = self.config.architecture

    @property
    def folder(self) -> Path | None:
        """The model's folder; of a GGUF file the one that is derived from it, which the first call makes."""
        if self._folder is None and self._gguf is not None:
            self._folder = self._gguf.derive_folder()
        return self._folder

    @property
    def has_weights(self) -> bool:
        """Whether there are weights, also pickled ones (which are then refused by name)."""
        is_model = self._gguf is not None or self.exported is not None
        return is_model or self.has_safetensors or self._has_pickled()

    @property
    def has_safetensors(self) -> bool:
        """Whether the folder holds weights in files that are read."""
        return self._folder is not None and any(self._folder.glob("*.safetensors*"))

    @property
    def export_lock(self) -> Path | None:
        """The lock file of an export; None: there is none."""
        path = None if self.exported is None else Path(self.exported.folder) / LOCK
        return path if path is not None and path.exists() else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds a tokenizer's vocabulary."""
        return self.folder is not None and has_vocabulary(self.folder)

    def _has_pickled(self) -> bool:
        """Whether the folder holds weights in pickled files, which are never read, or in Paddle's own form."""
        if self._folder is None:
            return False
        return any(p.suffix in (".bin", ".pt", ".pth") or is_paddle_file(p.name) for p in self._folder.iterdir())

    def source(self) -> SafetensorsFolder | GGUFSource:
        """The checkpoint's tensors, to be read by name; opened, and their headers read, at the first call.

        Raises:
            CheckpointError: there are none, or they are damaged.
        """
        if self._source is not None:
            return self._source
        if self.exported is not None:
            raise CheckpointError(
                f"{self.name} is an export, whose weights are packed: it has no tensors to be read by name.",
                remedy="load the model that it was made from",
            )
        if self._folder is None:
            raise CheckpointError(
                f"{self.name} was given as a config without weights.",
                remedy='pass load_format="dummy" for random weights, or a folder with weights',
            )
        self._source = SafetensorsFolder(self._folder, partial(canonical_names, config=self.config))
        return self._source

    def config_of_tensors(self) -> Config:
        """The config, with its output head tied to the embedding or not as the tensors have it (`settle_head`), and
        without an order of columns that they do not have (`settle_order`)."""
        if self.exported is not None:
            return self.config
        config, stated = settle_head(self.config, self.source()), self.config.get("quantization_config")
        settled = self._settled_order
        return config if settled is stated else Config({**config, "quantization_config": settled}, config.name)

    @cached_property
    def _settled_order(self) -> Any:
        """The config's quantization settings, as the tensors have them."""
        return settle_order(self.config.get("quantization_config"), self.source())

    def complaints(self) -> tuple[str, ...]:
        """Warnings about the config and, once `source` has opened them, the tensors' files; a sentence each."""
        found = tuple(f"{self.config.name}: {what}" for what in complaints(self.config))
        return found if self._source is None else (*found, *self._source.complaints)

    def weight_files(self) -> list[Path]:
        """The files that hold the weights, by name."""
        if self._gguf is not None:
            return sorted({entry.path for entry in self._gguf.header.tensors.values()})
        source = self.source()
        assert isinstance(source, SafetensorsFolder)
        return source.list_files()

    def names(self) -> Iterable[str]:
        """Names of the checkpoint's tensors; opens the files if need be. An export has those of a quantized one alone,
        for which they are needed."""
        if self.exported is not None:
            return self.exported.names or ()
        return self.source().names()


def _what_it_is(name: str, path: Path) -> str:
    """What a model is that is no folder, for an error."""
    if path.is_file():
        return ", but a file"
    return ", but an address of which nothing is downloaded" if ADDRESS.fullmatch(name) else " or file"


def _how_to_get_a_folder(name: str, path: Path) -> str:
    """What to do about a model that is no folder."""
    if path.is_file():
        return f"pass its folder, {path.parent}"
    if name.startswith("ollama:"):
        return "pass the GGUF file that ollama keeps (`ollama show --modelfile NAME` names it after FROM)"
    if near := near_short_names(name):
        return f"perhaps {' or '.join(near)} was meant; `inferplane list --names` shows all short names"
    return "check the name, or pass the folder of the model's files; `inferplane list --names` shows the short names"
