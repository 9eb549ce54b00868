"""Rotations that a checkpoint states (compressed-tensors' `transform_config`): which modules read what is rotated while
running.

What is folded into weights (`weight_input`, `weight_output`) needs nothing. Of the others, Hadamard matrices without
random signs before a module are carried out, by blocks of a power of two (`head_dim`, or `block_size`).

Source: compressed-tensors' transforms (`TransformScheme`, `TransformArgs`, `HadamardFactory`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferplane.quant.mixed_groups import REGEX

TRANSFORMS = "transform_config"
"""Entry of a quantization config; of a model's config where nothing is quantized yet."""
FOLDED = ("weight_input", "weight_output")
INPUT = "input"
SCHEME_KEYS = ("type", "apply", "randomize", "requires_grad", "precision", "head_dim", "block_size")
ARGS_KEYS = ("targets", "location", "inverse", "ignore")


@dataclass(frozen=True)
class InputRotation:
    """Modules whose input is rotated.

    Args:
        targets: names of modules, or "re:" with a regular expression that matches the beginning of one.
        ignore: likewise; modules that are left out.
        block: columns that are rotated together; 0: all.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    block: int

    def includes(self, module: str) -> bool:
        """Whether the input of a module is rotated."""
        return _matches(self.targets, module) and not _matches(self.ignore, module)


def _matches(patterns: Sequence[str], module: str) -> bool:
    return any(
        re.match(pattern.removeprefix(REGEX), module) if pattern.startswith(REGEX) else pattern == module
        for pattern in patterns
    )


def read_rotations(transforms: Any) -> tuple[InputRotation, ...] | None:
    """The rotations of a `transform_config`; None if it states something that is not carried out."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not transforms or groups == {}:
        return ()
    if not isinstance(groups, Mapping) or set(transforms) != {"config_groups"}:
        return None
    found: list[InputRotation] = []
    for scheme in groups.values():
        rotations = _read_scheme(scheme)
        if rotations is None:
            return None
        found += rotations
    return tuple(found)


def _read_scheme(scheme: Any) -> list[InputRotation] | None:
    if not isinstance(scheme, Mapping) or set(scheme) - set(SCHEME_KEYS):
        return None
    applied = scheme.get("apply")
    if not isinstance(applied, list) or not all(isinstance(args, Mapping) for args in applied):
        return None
    online = [args for args in applied if args.get("location") not in FOLDED]
    block = scheme.get("block_size") or scheme.get("head_dim") or 0
    is_plain = scheme.get("type") == "hadamard" and not scheme.get("randomize")
    if online and not (is_plain and isinstance(block, int) and block & (block - 1) == 0):
        return None
    found = []
    for args in online:
        targets, ignore = args.get("targets"), args.get("ignore") or []
        known = args.get("location") == INPUT and not set(args) - set(ARGS_KEYS)
        if not known or not _are_names(targets) or not _are_names(ignore):
            return None
        found.append(InputRotation(tuple(targets), tuple(ignore), block))
    return found


def _are_names(patterns: Any) -> bool:
    """Whether these are names of modules and regular expressions; classes, such as "Linear", are not read here."""
    if not isinstance(patterns, list) or not all(isinstance(p, str) and "." in p for p in patterns):
        return False
    for pattern in patterns:
        if pattern.startswith(REGEX):
            try:
                re.compile(pattern.removeprefix(REGEX))
            except re.error:
                return False
    return True


def find_rotations(config: Mapping[str, Any]) -> tuple[InputRotation, ...]:
    """The rotations of a model, by its config; none where `check_instructions` refuses what is stated."""
    return read_rotations(_find_stated(config)) or ()


def take_transforms(config: dict[str, Any]) -> Any:
    """What a config states as `transform_config`, removed where it stands beside no quantization; None: nothing."""
    found = _find_stated(config)
    config.pop(TRANSFORMS, None)
    return found


def _find_stated(config: Mapping[str, Any]) -> Any:
    settings = config.get("quantization_config")
    stated = settings.get(TRANSFORMS) if isinstance(settings, Mapping) else None
    return stated or config.get(TRANSFORMS)


def describe_rotations(blocks: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The `transform_config` of rotations.

    Args:
        blocks: columns that are rotated together -> targets, as `InputRotation` has them.
    """

    def scheme(block: int, targets: Sequence[str]) -> dict[str, Any]:
        sides = (("input", False), ("weight_input", True))
        apply = [{"targets": [*targets], "location": x, "inverse": y, "ignore": []} for x, y in sides]
        return {"type": "hadamard", "apply": apply, "randomize": False, "requires_grad": False, "head_dim": block}

    return {"config_groups": {f"R4_{block}": scheme(block, targets) for block, targets in sorted(blocks.items())}}
