"""EAGLE heads: one decoder layer that drafts tokens for a model and shares its embedding and output head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.draft_layers import DraftLayers, read_from
from inferplane.models.families.llama import llama
from inferplane.models.reading.config import Config
from inferplane.ops import AddRMSNorm, CausalLM, Eagle3Layer, EagleLayer, GQABlock, HyperLayer, LMHead, ShortcutLayer
from inferplane.types import Weight

BELOW = "model."
"""Where names lie that have a last norm beside them, as those of EAGLE-3 heads do (`models.reading.names`)."""
LAYER_NAMES = ("midlayer.", "layers.0.")
"""What the names of an EAGLE-3 head's layer begin with: as first published, and by later tools."""


def eagle_head(target: CausalLM, build: Build, names: Collection[str] | None) -> DraftLayers:
    """The layer of an EAGLE head.

    Args:
        target: the model that it drafts for.
        build: of the head's own config; `format_of` and `ignore` take the names in the head's checkpoint.
        names: of the tensors in the head's checkpoint; None without a checkpoint.

    Raises:
        CheckpointError: the checkpoint is no EAGLE head.
        UnsupportedModelError: its config has the form of speculators. Otherwise as `eagle`.
    """
    if build.config.get("transformer_layer_config") is not None:
        raise UnsupportedModelError(
            f"{build.config.name} has transformer_layer_config: an EAGLE head in the form of speculators.",
            there_is="heads whose config states the sizes of their layer at the top level",
            remedy="use a head in the form that its authors published, or method 'ngram' or 'suffix'",
        )
    if names is not None and not {"fc.weight", f"{BELOW}fc.weight"} & {*names}:
        raise CheckpointError(
            f"{build.config.name} belongs to no EAGLE head: the checkpoint lacks fc.weight.",
            remedy="name the folder of an EAGLE head, or choose another method",
        )
    if is_eagle3(build.config, names):
        return DraftLayers((eagle3(build, target, names),), tuple(build.ignored))
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
    width = _check_match(build.config, target, layers="heads of one layer (EAGLE-1)")
    own = build.format_of
    inner = replace(build, format_of=lambda name: own(name.removeprefix("model.")), ignored=[])
    layer = read_from(llama(inner).layers[0], lambda name: name.removeprefix("model."))
    build.ignore(*(name.removeprefix("model.") for name in inner.ignored))
    build.ignore("embed_tokens.weight", "lm_head.weight", "layers.0.input_layernorm.weight")
    return EagleLayer(
        embed=target.embed_once,
        fc=build.linear("fc", rows=width, columns=2 * width, bias=bias),
        attn=layer.attn,
        mlp_norm=layer.mlp_norm,
        mlp=layer.mlp,
        head=LMHead(target.head.weight),
        gather=build.gather(),
    )


def is_eagle3(config: Config, names: Collection[str] | None) -> bool:
    """Whether a head is EAGLE-3, by its architecture, its vocabulary, or its tensors."""
    named = any("eagle3" in str(name).lower() for name in config.get("architectures") or ())
    offsets = any(name.endswith("d2t") for name in names or ())
    return named or offsets or config.get("draft_vocab_size") is not None


def eagle3(build: Build, target: CausalLM, names: Collection[str] | None) -> Eagle3Layer:
    """Build an EAGLE-3 head with a Llama layer: `fc`, one layer whose queries, keys and values read the embedding and
    the state, `norm`, and a head of the most frequent tokens.

    Args:
        build: of the head's own config; `format_of` and `ignore` take the names in the head's checkpoint.
        target: the model that the head drafts for.
        names: of the tensors in the head's checkpoint; None without a checkpoint.

    Returns:
        The op. Its weights have the checkpoint's names.

    Raises:
        UsageError: the hidden size or the vocabulary differs from the target's.
        UnsupportedModelError: the head has more than one layer, or the target is too small for the usual three states.

    Source: arXiv 2503.01840; names as in the heads published with it; which states are read, and the order of norms and
    sums, as in the modeling file published with it.
    """
    config = build.config
    width = _check_match(config, target, layers="heads of one layer")
    known = () if names is None else names
    below = BELOW if names is None or f"{BELOW}fc.weight" in names else ""
    prefixes = [f"{below}{prefix}" for prefix in LAYER_NAMES]
    prefix = next((p for p in prefixes if any(n.startswith(p) for n in known)), prefixes[0])

    def rename(name: str) -> str:
        return name.replace("model.layers.0.", prefix, 1)

    own, vocab = build.format_of, config.size("draft_vocab_size", target.vocab)
    inner = replace(build, format_of=lambda name: own(rename(name)), ignored=[])
    layer = read_from(llama(inner).layers[0], rename)
    attn: GQABlock = layer.attn
    qkv = replace(attn.qkv.weight, shape=(attn.qkv.weight.shape[0], 2 * width))
    has_offsets = f"{below}d2t" in names if names is not None else vocab != target.vocab
    if not has_offsets and vocab != target.vocab:
        raise CheckpointError(
            f"{config.name} has {vocab} tokens of {target.vocab}, and lacks d2t, which says which.",
            remedy="fetch the head's files again",
        )
    _refuse_other_forms(config, known, below)
    if any(isinstance(layer, (ShortcutLayer, HyperLayer)) for layer in target.layers):
        raise UnsupportedModelError(
            "An EAGLE-3 head for a model whose layers have a shortcut or several residual streams: between them no "
            "hidden state is whole.",
            remedy="use method 'ngram', 'suffix' or 'draft_model'",
        )
    build.ignore(f"{below}embed_tokens.weight", f"{below}t2d", *map(rename, inner.ignored))
    taps = _find_taps(config, len(target.layers))
    return Eagle3Layer(
        embed=target.embed_once,
        fc=build.linear(f"{below}fc", rows=width, columns=len(taps) * width),
        embed_norm=layer.attn_norm.norm,
        hidden_norm=build.rms_norm(f"{prefix}hidden_norm", width),
        attn=replace(attn, qkv=replace(attn.qkv, weight=qkv)),
        mlp_norm=layer.mlp_norm,
        mlp=layer.mlp,
        norm=AddRMSNorm(build.rms_norm(f"{below}norm", width)),
        head=LMHead(build.weight(["lm_head"], (vocab, width))),
        offsets=Weight((f"{below}d2t",), (vocab,), torch.int64) if has_offsets else None,
        vocab=target.vocab,
        taps=taps,
        adds_normed=bool(config.get("norm_before_residual") or False),
    )


OTHER_FORMS = ("norm_before_fc", "fc_norm", "norm_output")
"""Entries of heads with further norms, which are not implemented."""
OTHER_TENSORS = ("input_norm.", "fc_norm.", "fc.bias")
"""What the names of tensors begin with that such heads have, and heads with a bias of `fc`."""


def _section(config: Config) -> Mapping[str, Any]:
    """The entry `eagle_config`; empty without one."""
    inner = config.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def _refuse_other_forms(config: Config, names: Collection[str], below: str) -> None:
    """Raise UnsupportedModelError for a head with norms or biases that would be left out."""
    found = [entry for entry in OTHER_FORMS if config.get(entry) or _section(config).get(entry)]
    begins = tuple(f"{below}{name}" for name in OTHER_TENSORS)
    if found := found or sorted(name.removeprefix(below) for name in names if name.startswith(begins)):
        raise UnsupportedModelError(
            f"{config.name}: an EAGLE-3 head with {found[0]}.",
            there_is="heads without norms before or behind fc, and without a bias of it",
            remedy="use another head, or method 'ngram' or 'suffix'",
        )


def _find_taps(config: Config, layers: int) -> tuple[int, ...]:
    """The layers before which the head reads hidden states: the config's, or an early, the middle and a late one. The
    section `eagle_config` numbers the layers whose results are read, so each is read before the next one.
    """
    entry = "eagle_aux_hidden_state_layer_ids"
    stated, behind = config.get(entry), 0
    if stated is None or stated == []:
        stated, behind = _section(config).get(entry), 1
    if stated is not None and not (isinstance(stated, list) and all(type(number) is int for number in stated)):
        raise CheckpointError(f"{config.name}: {entry} = {stated!r} is no list of numbers.", remedy="correct the entry")
    taps = tuple(number + behind for number in stated) if stated else (2, layers // 2, layers - 3)
    if list(taps) != sorted({*taps}) or not all(type(tap) is int and 0 <= tap < layers for tap in taps):
        raise UnsupportedModelError(
            f"An EAGLE-3 head that reads the hidden states before layers {', '.join(map(str, taps))}.",
            there_is=f"rising numbers from 0 to {layers - 1}, in its config as {entry}; in eagle_config one less each",
            remedy="use a head that was trained for this model",
        )
    return taps


def _check_match(config: Config, target: CausalLM, *, layers: str) -> int:
    """The hidden size, which has to be the target's, as the vocabulary; the head has to have one layer."""
    width: int = target.embed.weight.shape[1]
    for entry, want in (("hidden_size", width), ("vocab_size", target.vocab)):
        if config.size(entry) != want:
            raise UsageError(
                f"The EAGLE head has {entry} = {config.size(entry)}, its model has {want}.",
                remedy="use a head that was trained for this model",
            )
    if config.size("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"An EAGLE head of {config.size('num_hidden_layers')} layers.",
            there_is=layers,
            remedy="use another head, or method 'ngram' or 'suffix'",
        )
    return width
