"""Multi-token-prediction layers with files or weight formats of their own, beside a model that is built already."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferplane.errors import UsageError
from inferplane.models.build import Build
from inferplane.models.draft_layers import DraftLayers, read_from
from inferplane.models.reading.config import Config
from inferplane.models.reading.names import EMBEDDING, HEAD
from inferplane.models.registry import build as build_model
from inferplane.ops import CausalLM
from inferplane.types import Weight

LAYERS, COUNT = "num_hidden_layers", "num_nextn_predict_layers"
_OF_MODEL = (
    *(LAYERS, "first_k_dense_replace", "tie_word_embeddings", "architectures"),
    *("max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"),
)
"""Entries that a folder with prediction layers alone does not decide: where layers are in the whole model, what their
positions are, and which constructor makes them."""
_PROJECTION = re.compile(r"(model\.layers|model\.mtp)\.(\d+)\.(?:eh|e)_proj\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
COPIES = {"embedding": (EMBEDDING, "embed_tokens.weight"), "head": (HEAD, "shared_head.head.weight")}
"""What prediction layers share with the model -> its name there, and that of a copy in a layer."""


@dataclass(frozen=True)
class StoredLayers:
    """How files store prediction layers.

    Args:
        first: number of the model's first prediction layer: that of its layers.
        numbers: of the layers in the files, in order.
        below: what their names begin with, before the number.
    """

    first: int
    numbers: tuple[int, ...]
    below: str = "model.layers"

    def list_prefixes(self) -> tuple[str, ...]:
        """What the names of each layer's tensors in the files begin with."""
        return tuple(f"{self.below}.{number}." for number in self.numbers)

    def find_name(self, name: str) -> str:
        """The name in the files of a tensor of a prediction layer, by its name in the model; other names as they
        are.
        """
        found = _LAYER.match(name)
        index = int(found[1]) - self.first if found else -1
        if found is None or not 0 <= index < len(self.numbers):
            return name
        return f"model.layers.{self.numbers[index]}.{name[found.end() :]}"

    def find_copies(self, names: Collection[str]) -> dict[str, str]:
        """ "embedding" and "head" -> the name of its copy in the files, if there is one."""
        found = {}
        for what, (of_model, of_layer) in COPIES.items():
            candidates = (f"{self.list_prefixes()[0]}{of_layer}", of_model)
            if name := next((name for name in candidates if name in names), None):
                found[what] = name
        return found


def find_layers(model: Config, config: Config, names: Collection[str] | None, name: str) -> StoredLayers:
    """Find the prediction layers in files: at their numbers in the whole model, or numbered from 0.

    Args:
        model: the config of the model that they draft for.
        config: of the files.
        names: of the tensors in them; None without a checkpoint: the config alone decides.
        name: of the files, for errors.

    Raises:
        UsageError: there are none.
    """
    first = model.size(LAYERS)
    if names is None:
        numbers, below = {first + k for k in range(config.count(COUNT))}, {StoredLayers.below}
    else:
        stored = [found for found in map(_PROJECTION.fullmatch, names) if found]
        numbers, below = {int(found[2]) for found in stored}, {found[1] for found in stored}
    if not numbers:
        raise _lacks_layers(name)
    return StoredLayers(first, tuple(sorted(numbers)), below.pop())


def check_stored(model: CausalLM, names: Collection[str] | None, name: str) -> None:
    """Raise UsageError if a model's files hold no tensor of its prediction layers, whatever its config counts.

    Args:
        model: built with the layers.
        names: of the tensors in the files; None without a checkpoint.
        name: of the files.
    """
    own = DraftLayers(model.mtp).own_weights(replace(model, mtp=()))
    parts = {part for _, weight in model.weights() if id(weight) in own for part in weight.parts}
    if names is not None and parts and not parts & set(names):
        raise _lacks_layers(name)


def _lacks_layers(name: str) -> UsageError:
    return UsageError(
        f"{name} has no multi-token-prediction layers.",
        there_is="'ngram', which needs none",
        remedy="name a folder with tensors model.layers.*.eh_proj.weight, or choose another method",
    )


def check_match(model: Config, config: Config, name: str) -> None:
    """Raise UsageError if files are of another family than a model, or of one of another width or vocabulary.

    Args:
        model: config of the model. config: of the files.
        name: of the files.
    """
    for entry in ("model_type", "hidden_size", "vocab_size"):
        want, found = model.get(entry), config.get(entry)
        if found != want:
            raise UsageError(
                f"The prediction layers of {name} have {entry} = {found!r}, the model has {want!r}.",
                remedy="use layers that were trained for this model",
            )


def join_configs(model: Config, config: Config, stored: StoredLayers) -> Config:
    """The config of the model with prediction layers as other files have them.

    Args:
        model: config of the model. config: of the files.
        stored: the layers in them.
    """
    own = {key: value for key, value in config.items() if key not in _OF_MODEL}
    joined = Config({**model, **own, COUNT: len(stored.numbers)}, config.name)
    if "quantization_config" not in config:
        joined.pop("quantization_config", None)
    return joined


def mtp_layers(
    target: CausalLM, build: Build, stored: StoredLayers, copies: Mapping[str, str], plugins: Mapping[str, Any]
) -> DraftLayers:
    """The prediction layers behind a model, which read the model's embedding and head, or their own copies.

    Args:
        target: the model.
        build: with the joined config and `mtp`; `format_of` takes names as the model has them.
        stored: the layers in the files.
        copies: "embedding" and "head" -> the name of the copy to read in place of the model's.
        plugins: constructors of plugins by architecture.

    Raises:
        As the model's constructor.
    """
    model = build_model(build, plugins)
    constants = {path: w for path, w in target.weights() if w.make is not None}
    shared: dict[int, Weight] = {id(w): constants[path] for path, w in model.weights() if path in constants}
    for what, of_model, of_layers in (
        ("embedding", target.embed.weight, model.embed.weight),
        ("head", target.head.weight, model.head.weight),
    ):
        own = copies.get(what)
        if what == "head" and of_layers is model.embed.weight:
            continue  # tied: it is the embedding
        shared[id(of_layers)] = of_model if own is None else replace(of_layers, parts=(own,))
    return DraftLayers(
        tuple(read_from(layer, stored.find_name, shared) for layer in model.mtp),
        tuple(f"*.{name}" for _, name in COPIES.values()),
        tuple(copies),
    )
