"""Settings of single modules beside those of all: GPTQModel's `dynamic` and AutoRound's `extra_config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inferplane.errors import UnsupportedModelError

Changes = Mapping[str, Any]
"""Entries that a module has in place of those of all modules."""
EXCLUDES, INCLUDES = "-:", "+:"
LEAST_PLAIN_BITS = 16
WRAPPED = ("model.language_model.", "language_model.model.")
"""What a language model's module names may begin with in its exporter, where they begin with `model.` here."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Which modules have settings of their own. Rules are equal if they are the same one.

    Args:
        text: how the settings name the modules, for errors.
        matches: whether a module, by its name, is one of them.
        changes: their entries; None: they are not quantized.
    """

    text: str
    matches: Callable[[str], Any]
    changes: Changes | None


@dataclass(frozen=True)
class ModuleRules:
    """The settings of single modules.

    Args:
        rules: the first one that matches a module counts.
        named: what modules have that are listed by their names; these count before `rules`.
    """

    rules: tuple[Rule, ...] = ()
    named: Mapping[str, Rule] | None = None

    def __bool__(self) -> bool:
        return bool(self.rules or self.named)

    def __iter__(self) -> Iterator[Rule]:
        return iter((*(self.named or {}).values(), *self.rules))

    def find(self, module: str) -> Rule | None:
        """The rule of a module; None: it has the settings of all."""
        for name in spell_module(module):
            if self.named is not None and name in self.named:
                return self.named[name]
            if found := next((rule for rule in self.rules if rule.matches(name)), None):
                return found
        return None


def spell_module(module: str) -> Iterator[str]:
    """A module's name as it is here, then as exporters of models with towers spell it."""
    yield module
    if module.startswith("model."):
        yield from (wrapped + module.removeprefix("model.") for wrapped in WRAPPED)


def read_dynamic(settings: Mapping[str, Any]) -> ModuleRules:
    """GPTQModel's `dynamic`: regular expressions that match the beginning of modules' names.

    Those with "-:" exclude modules and come first; others, with "+:" or without, change entries. The first one that
    matches counts, alone.

    Raises:
        UnsupportedModelError: it is something else.

    Source: GPTQModel's `BaseQuantizeConfig` and `dynamic_get`; vLLM's `get_dynamic_override`.
    """
    stated = settings.get("dynamic") or {}
    if not isinstance(stated, Mapping) or not all(isinstance(key, str) for key in stated):
        raise refuse_rule("dynamic", stated)
    rules = []
    for key, changes in sorted(stated.items(), key=lambda item: not item[0].startswith("-")):
        excluded = key.startswith(EXCLUDES)
        if not excluded and not isinstance(changes, Mapping):
            raise refuse_rule("dynamic", {key: changes})
        matches = _compile("dynamic", key.removeprefix(EXCLUDES if excluded else INCLUDES)).match
        rules.append(Rule(f"dynamic {key!r}", matches, None if excluded else drop_null(changes)))
    return ModuleRules(tuple(rules))


def read_extra_config(settings: Mapping[str, Any], names: Collection[str] | None) -> ModuleRules:
    """AutoRound's `extra_config`: names of modules, and regular expressions that match anywhere in others' names.

    Modules of 16 bits or more are not quantized.

    Args:
        settings: have the entry, or not.
        names: the checkpoint's tensors; None without a checkpoint: keys are names if nothing in them is special.

    Raises:
        UnsupportedModelError: it is something else.

    Source: AutoRound's `get_layer_config` and `_expand_regex_config`.
    """
    stated = settings.get("extra_config") or {}
    if not isinstance(stated, Mapping) or not all(isinstance(key, str) for key in stated):
        raise refuse_rule("extra_config", stated)
    every = {name.rpartition(".")[0] for name in names or ()}
    modules = None if names is None else {spelled for module in every for spelled in spell_module(module)}
    text, named, rules = "\n".join(modules or ()), {}, []
    for key, changes in stated.items():
        if not isinstance(changes, Mapping):
            raise refuse_rule("extra_config", {key: changes})
        bits = changes.get("bits")
        plain = isinstance(bits, int) and bits >= LEAST_PLAIN_BITS
        if isinstance(changes.get("sym"), bool):
            changes = {**changes, "zero_point": not changes["sym"]}  # as AWQ calls it
        rule = Rule(f"extra_config {key!r}", lambda name: False, None if plain else drop_null(changes))
        is_plain = re.fullmatch(r"[\w.\-]+", key) is not None
        if is_plain if modules is None else key in modules:
            named[key] = rule
        elif changes and not (is_plain and key not in text):  # towers have hundreds that no module here can match
            rules.append(Rule(rule.text, _compile("extra_config", key).search, rule.changes))
    return ModuleRules(tuple(rules), named)


def drop_null(changes: Changes) -> Changes:
    """The entries that say something."""
    return {key: value for key, value in changes.items() if value is not None}


def refuse_rule(entry: str, value: Any) -> UnsupportedModelError:
    """The error for settings of modules in a form that is not known."""
    return UnsupportedModelError(
        f"The checkpoint's quantization_config has {entry} = {str(value)[:100]}, which is not understood.",
        there_is="objects with a regular expression or a module's name for each object of entries",
        remedy="correct the entry, or fetch the file again",
    )


def _compile(entry: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise refuse_rule(entry, f"{pattern} ({error})") from error
