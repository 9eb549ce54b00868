"""Names of projections that a checkpoint stores as one tensor."""

from __future__ import annotations

import re
from collections.abc import Collection

from inferplane.models.writing.compressed_form import WEIGHT


def is_stored_within(name: str, every: Collection[str]) -> bool:
    """Whether a projection is also part of a tensor that holds several.

    Args:
        name: of its tensor. every: names of all tensors.
    """
    whole = re.sub(r"(q|k|v)_proj\.weight$", "qkv_proj.weight", name)
    whole = re.sub(r"(gate|up)_proj\.weight$", "gate_up_proj.weight", whole)
    return whole != name and whole in every


JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Projections that engines join to one weight when they load a checkpoint."""


def list_joined(name: str, every: Collection[str]) -> tuple[str, ...]:
    """A weight and those that engines join to it.

    Args:
        name: of its tensor. every: names of all tensors.
    """
    module, _, last = name.removesuffix(WEIGHT).rpartition(".")
    names = next((names for names in JOINED if last in names), (last,))
    return tuple(found for part in names if (found := f"{module}.{part}{WEIGHT}".lstrip(".")) in every)


def list_parts(name: str) -> list[str]:
    """Names of the projections that are stored as one under this name; none if it is another."""
    for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for suffix in (WEIGHT, ".bias"):
            if name.endswith(f".{whole}{suffix}"):
                return [f"{name.removesuffix(whole + suffix)}{part}{suffix}" for part in parts]
    return []
