"""Whether quantization settings from two files say the same of a checkpoint's weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from inferplane.errors import UnsupportedModelError
from inferplane.quant.auto_round import is_auto_round, translate
from inferplane.quant.spelling import METHODS, OF_AWQ, OF_GPTQ, find_method


class Statement(NamedTuple):
    """An entry of settings: its name and value, and what it means, in one form for all spellings."""

    key: str
    value: Any
    meaning: Any

    def __str__(self) -> str:
        return f"{self.key} = {str(self.value)[:60]}"


def find_contradiction(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Statement, Statement] | None:
    """The first two entries that cannot both be true of the same weights; None if there are none.

    What one of the two does not state contradicts nothing, nor do entries that leave the weights as they are
    (`dataset`, `damp_percent`), or an order of columns (`desc_act`) where all columns of a row share a scale.
    """
    found = _list_statements(one), _list_statements(other)
    for topic, mine in found[0].items():
        theirs = found[1].get(topic)
        if theirs and not {x.meaning for x in mine} & {x.meaning for x in theirs}:
            return mine[0], theirs[0]
    return None


def complete(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`one`, with the entries about weights that only `other` states. A reader would take defaults for them.

    Settings of another method add nothing, nor those without a method to a method that is neither GPTQ's nor AWQ's.
    """
    if is_auto_round(one) != is_auto_round(other):  # their entries have other names
        return dict(one) if find_method(one) else {**other, **one}
    methods = find_method(one), find_method(other)
    if methods[0] not in ("", methods[1]) and (methods[1] or methods[0] not in METHODS):
        return dict(one)  # left over from another method, whose entries mean nothing here
    known = _list_statements(one)
    keys = [found.key for topic, each in _list_statements(other).items() if topic not in known for found in each]
    return {**{key: other[key] for key in keys if key in other}, **one}


def _list_statements(settings: Mapping[str, Any]) -> dict[str, list[Statement]]:
    """What settings say of weights, by topic."""
    method = find_method(settings)
    found: dict[str, list[Statement]] = {}
    if is_auto_round(settings):
        with contextlib.suppress(UnsupportedModelError):
            stated = f"{method}, packing_format = {settings.get('packing_format')}"
            settings = {"extra_config": settings.get("extra_config"), **translate(settings)}
            method = settings["quant_method"]
            found["method"] = [Statement("quant_method", stated, method)]
    elif method:
        key = next((k for k in ("quant_method", "method", *OF_AWQ, *OF_GPTQ) if settings.get(k) is not None), "")
        found["method"] = [Statement(key, settings.get(key), _spell_method(method))]
    for topic, meanings in TOPICS.items():
        statements = [
            Statement(key, settings[key], meaning)
            for key, read in meanings.items()
            if settings.get(key) is not None and (meaning := read(settings[key])) is not None
        ]
        if statements:
            found[topic] = statements
    if method not in (*METHODS, "compressed-tensors", ""):
        found.pop("layout", None)
    if method != "awq" and "layout" in found:
        found["layout"] = [x for x in found["layout"] if x.key != "version"]  # which is that of a package elsewhere
    if any(x.meaning == "-1" for x in found.get("group size", ())):
        found.pop("order", None)
    return {topic: statements for topic, statements in found.items() if statements}


def _spell_method(name: str) -> str:
    plain = name.lower().replace("_", "-")
    return "modelopt" if plain.startswith("modelopt") else plain


def _as_text(value: Any) -> str | None:
    """A number or word in one spelling; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip().lower().removeprefix("torch.") if isinstance(value, (str, int, float)) else None


def _as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).strip().lower())


def _is_symmetric(zero_point: Any) -> bool | None:
    has_zeros = _as_bool(zero_point)
    return None if has_zeros is None else not has_zeros


def _as_json(value: Any) -> str | None:
    """An object or list with entries; None for an empty one."""
    return json.dumps(value, sort_keys=True, default=str) if value else None


def _spell_groups(groups: Any) -> str | None:
    """What the groups of compressed-tensors say of weights, with the defaults of what they leave out."""
    if not isinstance(groups, Mapping) or not groups:
        return None
    found = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return None
        size = weights.get("group_size") if weights.get("strategy") in (None, "group", "tensor_group") else None
        numbers = weights.get("num_bits"), weights.get("type", "int"), weights.get("symmetric") is not False, size
        targets = group.get("targets")
        found.append([sorted(map(str, targets)) if isinstance(targets, list) else targets, *numbers])
    return json.dumps(sorted(found, key=str), default=str)


TOPICS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "bits": dict.fromkeys(("bits", "w_bit", "wbits"), _as_text),
    "group size": dict.fromkeys(("group_size", "q_group_size"), _as_text),
    "symmetry": {"zero_point": _is_symmetric, "sym": _as_bool},
    "order": {"desc_act": _as_bool},
    "layout": dict.fromkeys(("checkpoint_format", "format", "version"), _as_text),
    "packing": {"packing_format": _as_text},
    "words": {"pack_dtype": _as_text},
    "modules": {"dynamic": _as_json},
    "layers": {"extra_config": _as_json},
    "algorithm": {"quant_algo": _as_text},
    "blocks": {"weight_block_size": _as_json},
    "groups": {"config_groups": _spell_groups},
}
"""What settings may say of weights: topic -> the entries that say it -> a function from an entry's value to its
meaning, which is None for a value that says nothing."""
