"""Sites of two models that are held against each other: their names in the checkpoint, and whether they are alike."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from inferplane.errors import UsageError
from inferplane.ops import OPS, CausalLM, Op
from inferplane.ops.model import AnyLayer, DecoderStack
from inferplane.types import Weight

LAYERS = (*get_args(AnyLayer), DecoderStack)
"""Ops that take and return x and residual, whose sum is the hidden state."""
MOST_WORDS = 4
"""Modules that one name lists: q, k, v and a gate."""


def name_modules(model: CausalLM) -> dict[str, str]:
    """The modules of the checkpoint that each site stands for, by site, as `model.layers.0.mlp.{gate_proj,up_proj}`. A
    site without weights has the name of the module around it. Of sites with one name the later ones have the last word
    of their path too, as `model.layers.0.mlp (act)`.

    Args:
        model: a tree of ops.
    """
    found: dict[str, str] = {}
    for site, op in _list_called(model):
        modules = list(dict.fromkeys(part.rpartition(".")[0] for _, weight in op.weights() for part in weight.parts))
        has_parts = any(True for _, child in op.children() for _ in child.weights())
        if not modules:
            name = found.get(site.rpartition(".")[0], "")
        elif has_parts and len(modules) > 1:
            name = _common_prefix(modules)
        else:
            name = _join(modules)
        found[site] = name
    named: dict[str, str] = {}
    used: set[str] = set()
    for site, name in found.items():
        word = site.rpartition(".")[2]
        named[site] = f"{name} ({word})" if name in used else name
        used.add(name)
    return named


def _list_called(model: CausalLM) -> Iterator[tuple[str, Op]]:
    """Sites that a step of the model itself calls: not the layers that draft, nor the choice of tokens."""
    for site, op in model.sites():
        if site.partition(".")[0] not in model.called_by_engine:
            yield site, op


def _common_prefix(modules: Sequence[str]) -> str:
    split = [module.split(".") for module in modules]
    same = 0
    for words in zip(*split):
        if len(set(words)) > 1:
            break
        same += 1
    return ".".join(split[0][:same])


def _join(modules: Sequence[str]) -> str:
    """One name for modules: `a.{b,c}` if they differ in one word, of which there are few; else what they begin with."""
    split = [module.split(".") for module in modules]
    if len({len(words) for words in split}) > 1:
        return _common_prefix(modules)
    columns = [list(dict.fromkeys(words)) for words in zip(*split)]
    if sorted(map(len, columns))[-2:-1] > [1] or max(map(len, columns)) > MOST_WORDS:
        return _common_prefix(modules)
    return ".".join(words[0] if len(words) == 1 else f"{{{','.join(words)}}}" for words in columns)


def find_layer(site: str) -> int | None:
    """The number of the layer that a site is in; None: it is in none."""
    head, _, rest = site.partition(".")
    number = rest.partition(".")[0]
    return int(number) if head == "layers" and number.isdigit() else None


def find_part(site: str) -> str:
    """A site without the number of its layer: equal sites of all layers have one name."""
    return "layer" + site.removeprefix(f"layers.{number}") if (number := find_layer(site)) is not None else site


def check_alike(model: CausalLM, reference: CausalLM, names: tuple[str, str]) -> None:
    """Refuse models whose layers cannot be fed with each other's inputs.

    Args:
        model, reference: trees of ops.
        names: of both, for the error.

    Raises:
        UsageError: the number of layers, an op with weights or a weight's shape differs.
    """
    remedy = "hold a model against one of the same config: a copy of it, in another format or on another device"
    counts = len(model.layers), len(reference.layers)
    if counts[0] != counts[1]:
        raise UsageError(f"{names[0]} has {counts[0]} layers, {names[1]} {counts[1]}.", remedy=remedy)
    mine, theirs = (_describe(each) for each in (model, reference))
    for site in dict.fromkeys((*mine, *theirs)):
        if mine.get(site) != theirs.get(site):
            raise UsageError(
                f"{names[0]} and {names[1]} differ at {site}: {_in_words(mine, site)}, and {_in_words(theirs, site)}.",
                remedy=remedy,
            )


_Description = Mapping[str, tuple[str, Mapping[str, tuple[int, ...]]]]


def _describe(model: CausalLM) -> _Description:
    """The op and the shapes of its stored weights at each site that has any below."""
    found = {}
    for site, op in _list_called(model):
        shapes = {path: value.shape for path, value in op.items() if isinstance(value, Weight) and value.parts}
        if shapes or any(weight.parts for _, weight in op.weights()):
            found[site] = op.name, shapes
    return found


def _in_words(found: _Description, site: str) -> str:
    if site not in found:
        return "nothing"
    name, shapes = found[site]
    listed = ", ".join(f"{path} of {' x '.join(map(str, shape))}" for path, shape in shapes.items())
    return f"{name} with {listed}" if listed else name


def find_part_pins(model: CausalLM, pins: Mapping[str, str]) -> dict[str, str]:
    """Pins, with those that divide each op which is not hot into its parts where hot ops are below: what a larger
    kernel would run in one call is bound part by part then.

    Args:
        model: a tree of ops.
        pins: those of a user, which hold where they name a site or an op.
    """
    patterns = [name for name in pins if name not in OPS]
    divided = {
        op.name: "decomposition"
        for site, op in _list_called(model)
        if not op.hot
        and any(below.hot for _, below in op.sites())
        and not any(fnmatch.fnmatchcase(site, pattern) for pattern in patterns)
    }
    return {**divided, **pins}
