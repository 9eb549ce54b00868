"""Whether columns that share a scale lie side by side although a checkpoint's settings say that they may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inferplane.binding import TensorSource
from inferplane.types import Shard

INDEXES = {".g_idx": ".scales", ".weight_g_idx": ".weight_scale"}
"""Suffixes of a module's name that give the groups of its columns -> those that give its scales."""
SCATTERED = ("group", "dynamic", True)
"""Values of compressed-tensors' `actorder` with which the columns of a group may lie anywhere."""


def find_chunk_groups(group_of: torch.Tensor, width: int) -> torch.Tensor | None:
    """The group of each chunk of adjacent columns; None: columns of a chunk have several.

    Args:
        group_of: `[K]`, the group of each column.
        width: columns of a chunk; the last one may have fewer.
    """
    firsts = group_of[::width]
    same = torch.equal(group_of, firsts.repeat_interleave(width)[: len(group_of)])
    return firsts if same else None


def settle_order(settings: Any, source: TensorSource) -> Any:
    """Return quantization settings without their order of columns (`desc_act`, `actorder`) if all columns that share a
    scale lie side by side: with `static_groups`, for instance. Weights of scattered columns are expanded.

    Args:
        settings: a config's `quantization_config`, in any form.
        source: the checkpoint's tensors, of which the groups of columns are read if the settings state such an order.
    """
    if not isinstance(settings, Mapping) or not _states_order(settings):
        return settings
    for name in source.names():
        suffix = next((suffix for suffix in INDEXES if name.endswith(suffix)), None)
        if suffix is not None and not _is_in_order(source, name, name.removesuffix(suffix) + INDEXES[suffix]):
            return settings
    out = dict(settings)
    if out.get("desc_act") is True:
        out["desc_act"] = False
    if isinstance(out.get("dynamic"), Mapping):
        out["dynamic"] = {key: _without_order(changes) for key, changes in out["dynamic"].items()}
    if isinstance(out.get("config_groups"), Mapping):
        out["config_groups"] = {
            key: {**group, "weights": _without_order(group["weights"])} if _has_weights(group) else group
            for key, group in out["config_groups"].items()
        }
    return out


def _states_order(settings: Mapping[str, Any]) -> bool:
    dynamic, groups = settings.get("dynamic"), settings.get("config_groups")
    changes = [settings, *(dynamic.values() if isinstance(dynamic, Mapping) else ())]
    groups = groups.values() if isinstance(groups, Mapping) else ()
    by_group = any(_has_weights(g) and g["weights"].get("actorder") in SCATTERED for g in groups)
    return by_group or any(isinstance(c, Mapping) and c.get("desc_act") is True for c in changes)


def _has_weights(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)


def _without_order(changes: Any) -> Any:
    if not isinstance(changes, Mapping):
        return changes
    found = {"desc_act": False} if changes.get("desc_act") is True else {}
    return {**changes, **found, **({"actorder": "static"} if changes.get("actorder") in SCATTERED else {})}


def _is_in_order(source: TensorSource, name: str, scales: str) -> bool:
    """Whether the columns of each group of a module are adjacent, by its stored groups and the number of its scales."""
    shape, of_scales, dtype = source.shape(name), source.shape(scales), source.dtype(name)
    is_index = shape is not None and len(shape) == 1 and dtype is not None and not dtype.is_floating_point
    if not is_index or shape is None or of_scales is None or len(of_scales) != 2:
        return False
    groups = of_scales[0] if scales.endswith(".scales") else of_scales[1]
    group_of = torch.empty(shape, dtype=torch.int64)
    source.read_into(name, group_of, Shard())
    return groups > 0 and shape[0] % groups == 0 and find_chunk_groups(group_of, shape[0] // groups) is not None
