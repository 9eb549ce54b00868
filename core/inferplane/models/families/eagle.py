"""EAGLE heads: one decoder layer that drafts tokens for a model and shares its embedding and output head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.draft_layers import DraftLayers, read_from
from inferplane.models.families.llama import llama
from inferplane.ops import CausalLM, EagleLayer, LMHead


def eagle_head(target: CausalLM, build: Build, names: Collection[str] | None) -> DraftLayers:
    """The layer of an EAGLE head.

    Args:
        target: the model that it drafts for.
        build: of the head's own config; `format_of` and `ignore` take the names in the head's checkpoint.
        names: of the tensors in the head's checkpoint; None without a checkpoint.

    Raises:
        CheckpointError: the checkpoint is no EAGLE head. Otherwise as `eagle`.
    """
    if names is not None and "fc.weight" not in names:
        raise CheckpointError(
            f"{build.config.name} belongs to no EAGLE head: the checkpoint lacks fc.weight.",
            remedy="name the folder of an EAGLE head, or choose another method",
        )
    # Some published heads have a bias and some have none, and their configs do not tell reliably.
    bias = "fc.bias" in names if names is not None else build.config.flag("bias", True)
    return DraftLayers((eagle(build, target, bias=bias),), tuple(build.ignored))


def eagle(build: Build, target: CausalLM, *, bias: bool) -> EagleLayer:
    """Build an EAGLE-1 head with a Llama layer: `fc`, and `layers.0` without its first norm.

    Args:
        build: of the head's own config; `format_of` and `ignore` take the names in the head's checkpoint.
        target: the model that the head drafts for.
        bias: whether `fc` has a bias.

    Returns:
        The op. Its weights have the checkpoint's names.

    Raises:
        UsageError: the hidden size or the vocabulary differs from the target's.
        UnsupportedModelError: the head has more than one layer.

    Source: arXiv 2401.15077; names as in the heads published with it.
    """
    width = target.embed.weight.shape[1]
    for entry, want in (("hidden_size", width), ("vocab_size", target.vocab)):
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
    layer = read_from(llama(inner).layers[0], lambda name: name.removeprefix("model."))
    build.ignore("embed_tokens.weight", "lm_head.weight", "layers.0.input_layernorm.weight")
    return EagleLayer(
        embed=target.embed,
        fc=build.linear("fc", rows=width, columns=2 * width, bias=bias),
        attn=layer.attn,
        mlp_norm=layer.mlp_norm,
        mlp=layer.mlp,
        head=LMHead(target.head.weight),
        gather=build.gather(),
    )
