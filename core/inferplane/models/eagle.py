"""EAGLE heads: checkpoints of one decoder layer that draft for a model whose embedding and output head they use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from inferplane.errors import UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.config import Config
from inferplane.models.llama import llama
from inferplane.ops import CausalLM, EagleLayer, LMHead, Op
from inferplane.quant import stored
from inferplane.types import Shard, Weight

PREFIX = "eagle:"
"""Stands before the names of a head's tensors, where they are read beside those of its model."""


def with_eagle(
    target: CausalLM, config: Config, names: Collection[str] | None, positions: int
) -> tuple[CausalLM, list[str]]:
    """A model with an EAGLE head behind its `mtp` layers.

    Args:
        target: the model.
        config: the head's.
        names: tensors of the head's checkpoint; None when there is none.
        positions: positions the rotary tables must cover.

    Returns:
        The model, and patterns of the head's tensors that are expected and not read.

    Raises:
        As `eagle`.
    """
    found = stored(config.get("quantization_config"), names)
    if found.packed is not None:
        raise UnsupportedModelError(
            f"An EAGLE head whose weights are packed in {found.packed.bits} bits.", there_is="plain heads, and FP8"
        )
    b = Build(config, format_of=found.format_of, positions=positions, ignored=list(found.unread), acts=found.acts)
    # Published heads have a bias or none, and their configs do not say so reliably.
    bias = "fc.bias" in names if names is not None else config.flag("bias", True)
    head = eagle(b, target, bias=bias)
    return replace(target, mtp=(*target.mtp, head)), [PREFIX + pattern for pattern in b.ignored]


def eagle(b: Build, target: CausalLM, *, bias: bool) -> EagleLayer:
    """The head of EAGLE-1 with a Llama layer: `fc`, `layers.0` without its first norm, nothing else.

    Args:
        b: of the head's own config; `format_of` and `ignore` deal in the head's own names.
        target: the model it drafts for.
        bias: whether `fc` has one.

    Returns:
        The op, its weights named `eagle:` and the checkpoint's name.

    Raises:
        UsageError: its hidden size or vocabulary is not the target's.
        UnsupportedModelError: it has more than one layer.

    Source: arXiv 2401.15077; names as in the heads published with it.
    """
    vocab, width = target.embed.weight.shape
    for entry, want in (("hidden_size", width), ("vocab_size", vocab)):
        if b.config.size(entry) != want:
            raise UsageError(
                f"The EAGLE head has {entry} = {b.config.size(entry)}, the model it is to draft for has {want}.",
                remedy="use a head that was trained for this model",
            )
    if b.config.size("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"An EAGLE head of {b.config.size('num_hidden_layers')} layers.", there_is="heads of one layer (EAGLE-1)"
        )
    own = b.format_of
    inner = replace(b, format_of=lambda name: own(name.removeprefix("model.")))
    layer = _renamed(llama(inner).layers[0], lambda name: PREFIX + name.removeprefix("model."))
    head = replace(b, format_of=lambda name: own(name.removeprefix(PREFIX)))
    b.ignore("embed_tokens.weight", "lm_head.weight", "layers.0.input_layernorm.weight")
    return EagleLayer(
        embed=target.embed,
        fc=head.linear(f"{PREFIX}fc", rows=width, columns=2 * width, bias=bias),
        attn=layer.attn,
        mlp_norm=layer.mlp_norm,
        mlp=layer.mlp,
        head=LMHead(target.head.weight),
    )


def _renamed(op: Any, name: Callable[[str], str]) -> Any:
    """The same tree of ops with its weights read from other names. Weights of one name stay one weight."""
    made: dict[int, Weight] = {}

    def weight(w: Weight) -> Weight:
        return made.setdefault(id(w), replace(w, parts=tuple(map(name, w.parts))))

    def tree(x: Any) -> Any:
        if isinstance(x, Weight):
            return weight(x)
        if isinstance(x, tuple):
            return tuple(map(tree, x))
        return type(x)(**{f: tree(getattr(x, f)) for f in x.fields()}) if isinstance(x, Op) else x

    return tree(op)


class _Source(Protocol):
    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def dtype(self, name: str) -> torch.dtype | None: ...
    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None: ...
    def close(self) -> None: ...


class WithEagle:
    """A model's tensors, and those of its EAGLE head behind `PREFIX`. A `TensorSource`."""

    def __init__(self, model: _Source, head: _Source) -> None:
        self.model, self.head = model, head

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return [*self.model.names(), *(PREFIX + name for name in self.head.names())]

    def _at(self, name: str) -> tuple[_Source, str]:
        return (self.head, name.removeprefix(PREFIX)) if name.startswith(PREFIX) else (self.model, name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        source, own = self._at(name)
        return source.shape(own)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`."""
        source, own = self._at(name)
        return source.dtype(own)

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`."""
        source, own = self._at(name)
        source.read_into(own, out, shard)

    def close(self) -> None:
        """Close both."""
        self.model.close()
        self.head.close()
