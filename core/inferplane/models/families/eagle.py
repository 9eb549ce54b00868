"""EAGLE heads: one decoder layer that drafts tokens for a model and shares its embedding and output head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from inferplane.binding import TensorSource
from inferplane.errors import UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.families.llama import llama
from inferplane.models.reading.config import Config
from inferplane.ops import CausalLM, EagleLayer, LMHead, Op
from inferplane.quant import read_quant_config
from inferplane.types import Shard, Weight

PREFIX = "eagle:"
"""Prefix of the names of a head's tensors. It tells them from the tensors of the model, which are read together."""


def with_eagle(
    target: CausalLM, config: Config, names: Collection[str] | None, positions: int
) -> tuple[CausalLM, list[str]]:
    """Add an EAGLE head to a model, after its `mtp` layers.

    Args:
        target: the model.
        config: the config of the head.
        names: names of the tensors in the head's checkpoint; None without a checkpoint.
        positions: number of positions that the rotary tables must cover.

    Returns:
        The model with the head, and patterns of the head's tensors that are expected and not read.

    Raises:
        As `eagle`.
    """
    found = read_quant_config(config.get("quantization_config"), names)
    if found.packed is not None:
        raise UnsupportedModelError(
            f"An EAGLE head whose weights are packed in {found.packed.bits} bits.", there_is="plain heads, and FP8"
        )
    build = Build(
        config,
        format_of=found.format_of,
        positions=positions,
        ignored=list(found.unread),
        activation_quants=found.activation_quants,
    )
    # Some published heads have a bias and some have none, and their configs do not tell reliably.
    bias = "fc.bias" in names if names is not None else config.flag("bias", True)
    head = eagle(build, target, bias=bias)
    return replace(target, mtp=(*target.mtp, head)), [PREFIX + pattern for pattern in build.ignored]


def eagle(build: Build, target: CausalLM, *, bias: bool) -> EagleLayer:
    """Build an EAGLE-1 head with a Llama layer: `fc`, and `layers.0` without its first norm.

    Args:
        build: of the head's own config; `format_of` and `ignore` take the names in the head's checkpoint.
        target: the model that the head drafts for.
        bias: whether `fc` has a bias.

    Returns:
        The op. Its weights have the checkpoint's names behind `PREFIX`.

    Raises:
        UsageError: the hidden size or the vocabulary differs from the target's.
        UnsupportedModelError: the head has more than one layer.

    Source: arXiv 2401.15077; names as in the heads published with it.
    """
    vocab, width = target.embed.weight.shape
    for entry, want in (("hidden_size", width), ("vocab_size", vocab)):
        if build.config.size(entry) != want:
            raise UsageError(
                f"The EAGLE head has {entry} = {build.config.size(entry)}, its model has {want}.",
                remedy="use a head that was trained for this model",
            )
    if build.config.size("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"An EAGLE head of {build.config.size('num_hidden_layers')} layers.",
            there_is="heads of one layer (EAGLE-1)",
        )
    own = build.format_of
    inner = replace(build, format_of=lambda name: own(name.removeprefix("model.")))
    layer = _rename_weights(llama(inner).layers[0], lambda name: PREFIX + name.removeprefix("model."))
    head = replace(build, format_of=lambda name: own(name.removeprefix(PREFIX)))
    build.ignore("embed_tokens.weight", "lm_head.weight", "layers.0.input_layernorm.weight")
    return EagleLayer(
        embed=target.embed,
        fc=head.linear(f"{PREFIX}fc", rows=width, columns=2 * width, bias=bias),
        attn=layer.attn,
        mlp_norm=layer.mlp_norm,
        mlp=layer.mlp,
        head=LMHead(target.head.weight),
    )


def _rename_weights(op: Any, rename: Callable[[str], str]) -> Any:
    """Return the tree of ops with its weights read from other names. Weights that were shared stay shared."""
    made: dict[int, Weight] = {}

    def rename_weight(weight: Weight) -> Weight:
        return made.setdefault(id(weight), replace(weight, parts=tuple(map(rename, weight.parts))))

    def visit(value: Any) -> Any:
        if isinstance(value, Weight):
            return rename_weight(value)
        if isinstance(value, tuple):
            return tuple(map(visit, value))
        if isinstance(value, Op):
            return type(value)(**{field: visit(getattr(value, field)) for field in value.fields()})
        return value

    return visit(op)


class _Source(TensorSource, Protocol):
    def close(self) -> None: ...


class WithEagle:
    """A `TensorSource` with the tensors of a model and, behind `PREFIX`, those of its EAGLE head."""

    def __init__(self, model: _Source, head: _Source) -> None:
        self.model, self.head = model, head

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return [*self.model.names(), *(PREFIX + name for name in self.head.names())]

    def _source_of(self, name: str) -> tuple[_Source, str]:
        return (self.head, name.removeprefix(PREFIX)) if name.startswith(PREFIX) else (self.model, name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        source, own = self._source_of(name)
        return source.shape(own)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`."""
        source, own = self._source_of(name)
        return source.dtype(own)

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`."""
        source, own = self._source_of(name)
        source.read_into(own, out, shard)

    def close(self) -> None:
        """Close both sources."""
        self.model.close()
        self.head.close()
