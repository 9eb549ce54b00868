"""Finds the constructor of a model by the name of its architecture."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from inferplane.errors import PluginError, UnsupportedModelError, in_words
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.models.reading.normalize import EXPERT_NAMES, SPELLINGS, ExpertNames, Spelling, find_family
from inferplane.ops import CausalLM

Constructor = Callable[[Build], CausalLM]

ARCHITECTURES: dict[str, Constructor] = {}
"""The constructors in core by architecture; the decorator `architecture` fills it, plugins register more."""


def architecture(
    name: str,
    model_type: str,
    defaults: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
    expert_names: ExpertNames = EXPERT_NAMES,
    other_types: tuple[str, ...] = (),
    is_fused: bool = False,
    stacks_experts: Literal["", "inputs_first", "any_order"] = "",
    renames: Mapping[str, str] | None = None,
    splits: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Constructor], Constructor]:
    """Register the decorated function as the constructor of an architecture, by its name in config.json.

    Args:
        name: the architecture's.
        model_type, defaults, aliases, expert_names, other_types, is_fused, stacks_experts, renames, splits: how its
            configs and checkpoints are written (`Spelling`).
    """

    def mark(make: Constructor) -> Constructor:
        ARCHITECTURES[name] = make
        SPELLINGS[name] = Spelling(
            *(model_type, defaults, aliases or {}, expert_names, other_types, is_fused, stacks_experts),
            renames=renames or {},
            splits=splits or {},
        )
        return make

    return mark


_CAUSAL = ("causallm", "lmhead")
"""Parts of the names of causal language models, in small letters."""
OTHER_TASKS = {
    "classif": "classifies",
    "reward": "scores answers",
    "scor": "scores answers",
    "rerank": "scores documents",
    "embedding": "makes embeddings",
    "questionanswering": "marks answers in a text",
    "maskedlm": "fills gaps in a text",
    "multiplechoice": "chooses among answers",
}
"""Parts of the names of models for another task, in small letters -> what such a model does."""
_DRAFTS = ("eagle", "medusa", "mtp", "draft")


def find_other_task(name: str) -> str | None:
    """What a model does by the name of its architecture if it generates no text; None: the name does not say."""
    return next((task for part, task in OTHER_TASKS.items() if part in name.lower()), None)


def settle_architecture(config: Config, plugins: Mapping[str, Any] | None = None) -> Config:
    """The config as that of the family which `model_type` names, if no family has the causal language model that
    `architectures` names: transformers, too, goes by `model_type`. Others are returned as they are: with the name of
    a model for another task or of a head that drafts, or with code of their own.

    Args:
        config: a model's.
        plugins: constructors of plugins by architecture.

    Raises:
        CheckpointError: `architectures` is not a list of names.
    """
    family, stated = find_family(config), config.get("architectures")
    if family is None or not stated or config.get("auto_map"):
        return config
    name = config.architecture
    if name in ARCHITECTURES or name in (plugins or {}) or find_other_task(name):
        return config
    plain = name.lower().replace("_", "")
    if not any(part in plain for part in _CAUSAL) or any(part in plain for part in _DRAFTS):
        return config
    return Config({**config, "architectures": [family, *stated]}, config.name)


def constructor(architecture: str, plugins: Mapping[str, Any] | None = None) -> Constructor:
    """Find the constructor of an architecture, in core or in a plugin.

    Raises:
        UnsupportedModelError: there is none; the message names the nearest, and the page that lists all.
        PluginError: the constructor cannot be imported.
    """
    known = {**(plugins or {}), **ARCHITECTURES}
    target = known.get(architecture)
    if target is None and (task := find_other_task(architecture)):
        raise UnsupportedModelError(
            f"A model of the architecture {architecture!r} {task}: it generates no text.",
            there_is="causal language models; docs/models.md lists them",
            remedy="load the language model that it was made from, or serve this one with another tool",
        )
    if target is None:
        close = difflib.get_close_matches(architecture, known, 3, 0)
        near = difflib.get_close_matches(architecture, known, 1, 0.5)
        nearest = f" The nearest name that is known is {near[0]!r}." if near else ""
        others = f", among them {', '.join(close)}" if close else ""
        raise UnsupportedModelError(
            f"Architecture {architecture!r} is not known: no model family has its arithmetic.{nearest}",
            there_is=f"{len(known)} architectures{others}; docs/models.md lists them",
            remedy="load a model of one of these, or install a plugin that registers it (docs/adding-a-model.md)",
        )
    return resolve(target)


def build(build: Build, plugins: Mapping[str, Any] | None = None) -> CausalLM:
    """Build the tree of ops for a config. Nothing is read or allocated."""
    return constructor(build.config.architecture, plugins)(build)


def resolve(target: Any) -> Any:
    """Return the object with the dotted name "module:name"; return anything but a string unchanged.

    Raises:
        PluginError: the object cannot be imported.
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise PluginError(
            f"{target!r} cannot be imported ({in_words(error)}).",
            remedy="repair the plugin that registered it, or exclude it with INFERPLANE_PLUGINS",
        ) from error
