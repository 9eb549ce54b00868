"""Rotary positions of a layer: whole heads or a share of each, with the config's settings or others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferplane import ops
from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.models.rope import rope_table

Rotation = ops.Rope | ops.PartialRope


def head_size(config: Config) -> int:
    """Entries of a head: `head_dim`, or the heads' share of `hidden_size`.

    Raises:
        CheckpointError: the config lacks an entry, or the heads cannot share the width.
    """
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{config.name}: hidden_size = {width} cannot be divided into num_attention_heads = {heads} equal heads.",
            remedy="correct the entries, or add head_dim",
        )
    return config.size("head_dim", width // heads)


def rotation(
    build: Build,
    dim: int,
    *,
    interleaved: bool = False,
    partial: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Rotation:
    """Build the rotation of heads of `dim` entries.

    Args:
        build: its config gives the settings, its `positions` the length of the table.
        dim: entries of a head.
        interleaved: whether adjacent entries are turned, not those half a head apart.
        partial: whether only the share `partial_rotary_factor` of a head is rotated.
        settings: `rope_type`, `rope_theta` and the type's own entries, instead of the config's.

    Raises:
        CheckpointError: an entry that the type requires is missing or out of range.
        UnsupportedModelError: the type is not implemented.
    """
    config = build.config
    found = dict(config.rope if settings is None else settings)
    share = found.pop("partial_rotary_factor", 1) if partial else 1
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise CheckpointError(
            f"{config.name}: partial_rotary_factor is {share!r}, not a share above 0 and up to 1.",
            remedy="correct the entry, or fetch the file again",
        )
    size = int(dim * share)
    table = rope_table(
        {"max_position_embeddings": config.get("max_position_embeddings"), **found}, size, build.positions
    )
    rope = ops.Rope(table, interleaved)
    return rope if size == dim else ops.PartialRope(rope, size)


def rotate_all(build: Build, rope: Rotation) -> list[Rotation | None]:
    """The same rotation for each layer."""
    return [rope] * build.config.size("num_hidden_layers")


def rotate_some(rope: Rotation, rotated: Sequence[bool]) -> list[Rotation | None]:
    """Each layer's rotation: `rope` where `rotated` is true, else none."""
    return [rope if yes else None for yes in rotated]


def find_rotated_layers(config: Config, *, takes_empty: bool = False) -> list[bool]:
    """Whether each layer rotates: `no_rope_layers` marks with 0 those that do not, or, if the config lacks it, those at
    multiples of `no_rope_layer_interval` do not.

    Args:
        config: the model's.
        takes_empty: whether an empty list stands for none, as in transformers' Llama 4 alone.

    Raises:
        CheckpointError: it is not a list with a number 0 or 1 for each layer.
    """
    every, layers = config.size("no_rope_layer_interval"), config.size("num_hidden_layers")
    marks = config.get("no_rope_layers")
    marks = None if takes_empty and marks == [] else marks
    marks = [int((i + 1) % every != 0) for i in range(layers)] if marks is None else marks
    if not isinstance(marks, list) or len(marks) < layers or not all(mark in (0, 1) for mark in marks):
        raise CheckpointError(
            f"{config.name}: no_rope_layers is not a list of {layers} numbers 0 or 1, one a layer.",
            remedy="correct the entry, or fetch the file again",
        )
    return [bool(mark) for mark in marks[:layers]]
