"""Groups of modules that compressed-tensors quantizes differently: which group a weight belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Scheme = TypeVar("Scheme")
CLASSES = ("Linear", "LinearBase")
"""Targets that stand for every linear layer."""
REGEX = "re:"


def find_group(groups: Sequence[tuple[Sequence[str], Scheme]]) -> Callable[[str], Scheme | None]:
    """A function from a weight's name to what its group says; None: no group targets it.

    Args:
        groups: targets and what they are quantized to. A target is a module's name, "re:" with a regular expression
            that matches its beginning, or a class; names count before expressions, and these before classes.
    """
    by_name = {target: scheme for targets, scheme in groups for target in targets if not target.startswith(REGEX)}
    patterns = [
        (re.compile(target.removeprefix(REGEX)), scheme)
        for targets, scheme in groups
        for target in targets
        if target.startswith(REGEX)
    ]
    of_class = next((by_name[name] for name in CLASSES if name in by_name), None)

    def scheme_of(name: str) -> Scheme | None:
        module = name.removesuffix(".weight")
        if module in by_name:
            return by_name[module]
        return next((scheme for pattern, scheme in patterns if pattern.match(module)), of_class)

    return scheme_of


def list_targets(group: Mapping[str, Any]) -> list[str] | None:
    """A group's targets; None if they are no names and regular expressions."""
    targets = group.get("targets")
    if not isinstance(targets, (list, tuple)) or not all(isinstance(target, str) for target in targets):
        return None
    for target in targets:
        if target.startswith(REGEX):
            try:
                re.compile(target.removeprefix(REGEX))
            except re.error:
                return None
    return list(targets)
