"""How an architecture is written in GGUF files: the entries of a config, and the tensors' published names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inferplane.errors import CheckpointError, UnsupportedModelError, first_of
from inferplane.gguf.header import TensorEntry
from inferplane.gguf.metadata import Metadata
from inferplane.gguf.rotary import FREQUENCIES, LONG, SHORT, rotary

Entries = dict[str, Any]
ModuleNames = dict[str, "str | tuple[str, ...]"]
"""Name of a layer's module in GGUF -> its published name. A name with `{e}` stands for a stack of experts, several
names for rows that are stored as one. Keys and names with `.weight` or `.bias` are whole names."""
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
"""Tensors outside the layers."""
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
"""Vectors that files have as matrices."""
DERIVED = (FREQUENCIES, LONG, SHORT)
"""Tensors whose content is in the config."""
MAX_EXPERTS = 2**12
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.((?:shortconv\.)?[a-z0-9_]+)(?:\.(weight|bias))?")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor under its published name, and how it differs from what the file has.

    Args:
        entry: the file's tensor, or some rows of it.
        interleaved: rows of a head whose rotated pairs lie side by side in the file; 0: rows lie as published.
        add: what is added to the file's values.
        second: a second tensor that is part of this one.
        join: how: "alternate" takes rows in turn; "rows" has this one's rows before the second's, to be taken in an
            `order`; "kv_b" joins the two halves of MLA's `kv_b_proj`, the first of which
            lies transposed, for each head.
        is_exponential: the file's values are `-exp` of these.
        order: number of the file's row, or entry of a vector, for each published one; empty: as they lie.
        column_order: the same of columns.
    """

    entry: TensorEntry
    interleaved: int = 0
    add: float = 0.0
    second: TensorEntry | None = None
    join: Literal["", "alternate", "rows", "kv_b"] = ""
    is_exponential: bool = False
    order: tuple[int, ...] = ()
    column_order: tuple[int, ...] = ()


Layer = Callable[[Metadata, int, dict[str, TensorEntry]], Iterator[tuple[str, StoredTensor]]]


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Args:
        name: the first entry of `architectures`.
        model_type: the config's.
        config: the metadata -> entries of the config besides the common ones.
        modules: of a layer.
        outside: names outside the layers besides `OUTSIDE`, or in place of these.
        inside: what the published names of layers begin with.
        interleaved: modules of a layer whose rows are in the order in which adjacent entries rotate.
        norms_add: what the file has added to the weights of norms.
        theta: the base of rotary frequencies that files do not state.
        rest: takes those tensors of a layer that have no single published name.
        moe: the architecture of files with experts, where it is another one.
    """

    name: str
    model_type: str
    config: Callable[[Metadata], Entries]
    modules: ModuleNames
    outside: Mapping[str, str] = field(default_factory=dict)
    interleaved: tuple[str, ...] = ()
    norms_add: float = 0.0
    theta: float = 10000.0
    rest: Layer | None = None
    moe: Architecture | None = None
    inside: str = "model.layers"


ARCHITECTURES: dict[str, Architecture] = {}
"""`general.architecture` -> how its files are written."""


def find_architecture(meta: Metadata) -> Architecture:
    """The architecture of a file.

    Raises:
        UnsupportedModelError: it is not known.
    """
    found = ARCHITECTURES.get(meta.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{meta.where} holds a model of the architecture {meta.architecture[:64]!r}, which is not read from GGUF.",
            there_is=", ".join(sorted(ARCHITECTURES)),
            remedy="load the checkpoint that it was made from, in safetensors",
        )
    return found.moe if found.moe is not None and meta.size("expert_count", 0) else found


def make_config(meta: Metadata) -> Entries:
    """The entries of the config.

    Raises:
        CheckpointError: the metadata lack an entry, or have something else for it.
        UnsupportedModelError: the architecture, or a setting, is not known.
    """
    form = find_architecture(meta)
    shape = meta.tensors.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise meta.wrong("a tensor token_embd.weight with two dimensions", None if shape is None else list(shape))
    return {
        "architectures": [form.name],
        "model_type": form.model_type,
        "vocab_size": shape[0],
        "hidden_size": meta.size("embedding_length"),
        "num_hidden_layers": meta.layers,
        "max_position_embeddings": meta.size("context_length"),
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        **special_tokens(meta),
        **form.config(meta),
    }


def special_tokens(meta: Metadata) -> dict[str, int]:
    """The ids of special tokens, as config.json has them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {short: meta.values.get(f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    return {f"{short}_token_id": value for short, value in found.items() if type(value) is int}


def attention(meta: Metadata, theta: float = 10000.0) -> Entries:
    """Entries of attention with grouped queries, and of the MLP beside it."""
    return {
        "num_attention_heads": meta.heads,
        "num_key_value_heads": meta.kv_heads,
        "head_dim": meta.head_dim,
        "intermediate_size": meta.size_of_some("feed_forward_length", 0) or meta.size("expert_feed_forward_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": rotary(meta, theta),
    }


def biases(meta: Metadata) -> Entries:
    """Whether attention and MLP have biases."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in meta.tensors,
    }


def layer_types(meta: Metadata, otherwise: Callable[[int], bool]) -> list[str]:
    """The kind of each layer's attention.

    Args:
        meta: the metadata.
        otherwise: whether a layer has a window, if the file does not say.
    """
    stated, every = meta.get("attention.sliding_window_pattern"), 0
    flags = [otherwise(i) for i in range(meta.layers)]
    if type(stated) is int and stated > 0:
        every = stated
        flags = [(i + 1) % every != 0 for i in range(meta.layers)]
    elif stated is not None:
        flags = meta.flags("attention.sliding_window_pattern") or []
        if len(flags) < meta.layers:
            raise meta.wrong("a sliding_window_pattern of all layers", len(flags))
    return ["sliding_attention" if flag else "full_attention" for flag in flags[: meta.layers]]


def list_tensors(meta: Metadata, tensors: Mapping[str, TensorEntry]) -> dict[str, StoredTensor]:
    """The file's tensors under their published names. Nothing is read.

    Raises:
        CheckpointError: a tensor has no place in the architecture, or another shape than it has to have.
    """
    form, found, unknown = find_architecture(meta), {}, []
    layers: dict[int, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        outside = {**OUTSIDE, **form.outside}.get(name)
        layer = _LAYER.fullmatch(name)
        if outside is not None:
            add = form.norms_add if name == "output_norm.weight" else 0.0
            found[outside] = StoredTensor(entry, add=-add)
        elif layer is not None and int(layer[1]) < meta.layers:
            layers.setdefault(int(layer[1]), {})[name.split(".", 2)[2]] = entry
        elif name not in DERIVED and layer is None:
            unknown.append(name)
    for number, parts in layers.items():
        prefix = f"{form.inside}.{number}."
        if form.rest is not None:
            found.update((prefix + name, tensor) for name, tensor in form.rest(meta, number, parts))
        for name, entry in parts.items():
            made = list(_list_published(form, meta, name, entry))
            found.update((prefix + published, tensor) for published, tensor in made)
            if not made:
                unknown.append(f"blk.{number}.{name}")
    if unknown:
        raise CheckpointError(
            f"{meta.where}: {len(unknown)} tensor(s) have no place in a model of {meta.architecture}: "
            f"{first_of(unknown)}.",
            remedy="fetch a file that llama.cpp's current converter made",
        )
    return found


def _list_published(
    form: Architecture, meta: Metadata, name: str, entry: TensorEntry
) -> Iterator[tuple[str, StoredTensor]]:
    """The published tensors that a layer's tensor holds; none if it is not known."""
    module, _, kind = name.rpartition(".")
    if name in form.modules:
        names, suffix = form.modules[name], ""
        if name in FLAT:
            entry = replace(entry, shape=(math.prod(entry.shape),))
    elif module in form.modules:
        names, suffix = form.modules[module], f".{kind}"
    else:
        return
    names = (names,) if isinstance(names, str) else names
    experts = entry.shape[0] if "{e}" in names[0] else 0
    if experts > MAX_EXPERTS or (experts and len(entry.shape) != (3 if kind == "weight" else 2)):
        raise meta.wrong(f"a stack of experts {name!r}", list(entry.shape))
    for e in range(max(1, experts)):
        part = take_expert(entry, e) if experts else entry
        for i, one in enumerate(names):
            rows = part if len(names) == 1 else _share(meta, part, module, i, len(names))
            stored = StoredTensor(rows, is_exponential=name == "ssm_a")
            if module in form.interleaved:
                if meta.head_dim % 2 or rows.shape[0] % meta.head_dim:
                    raise meta.wrong(f"a tensor {name!r} of heads of {meta.head_dim}", list(rows.shape))
                stored = replace(stored, interleaved=meta.head_dim)
            if form.norms_add and module.endswith("norm") and module != "ssm_norm":
                stored = replace(stored, add=-form.norms_add)
            yield one.replace("{e}", str(e)) + suffix, stored


def take_expert(entry: TensorEntry, number: int) -> TensorEntry:
    """One of the tensors that are stacked in the first dimension."""
    nbytes = entry.nbytes // entry.shape[0]
    return replace(entry, shape=entry.shape[1:], start=entry.start + number * nbytes, nbytes=nbytes)


def take_rows(entry: TensorEntry, first: int, count: int) -> TensorEntry:
    """Some rows of a matrix, or entries of an unquantized vector."""
    nbytes = entry.nbytes // entry.shape[0]
    shape = (count, *entry.shape[1:])
    return replace(entry, shape=shape, start=entry.start + first * nbytes, nbytes=count * nbytes)


def _share(meta: Metadata, entry: TensorEntry, module: str, number: int, count: int) -> TensorEntry:
    """One of the tensors whose rows are stored as one: q, k and v, or equal shares."""
    sizes = [entry.shape[0] // count] * count
    if module == "attn_qkv":
        sizes = [meta.heads * meta.head_dim, *[meta.kv_heads * meta.head_dim] * 2]
    if sum(sizes) != entry.shape[0]:
        raise meta.wrong(f"a tensor {module} of {sizes} rows", list(entry.shape))
    return take_rows(entry, sum(sizes[:number]), sizes[number])
