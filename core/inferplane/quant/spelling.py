"""Spellings of quantization settings: entries under one name each, and the method where an exporter leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size"}
"""Other names of entries: AWQ's own, and GPTQ's before AutoGPTQ."""
OF_AWQ = ("w_bit", "q_group_size", "zero_point")
OF_GPTQ = ("desc_act", "damp_percent", "static_groups", "true_sequential")
"""Entries that only settings of this method have."""


METHODS = ("awq", "gptq")
"""Methods whose exporters have several names for an entry; those of others, such as plugins', stay as they are."""


def spell(settings: Mapping[str, Any], default: str = "") -> dict[str, Any]:
    """Return settings with `quant_method`, and those of AWQ and GPTQ with each entry under its usual name.

    Args:
        settings: the entries, as an exporter wrote them. An entry that is there under both of its names stays so.
        default: the method of settings that neither state one nor have entries of one method alone; "": they stay
            without.

    Source: `AwqConfig` of AutoAWQ and of transformers; `QuantizeConfig` of GPTQModel, which also writes `method`.
    """
    method = find_method(settings) or default
    if method.startswith("modelopt_"):  # the algorithm follows, which `quant_algo` says too
        method = "modelopt"
    stated = settings.get("quant_method") == method or not method
    out = dict(settings) if stated else {**settings, "quant_method": method}
    for other, name in NAMES.items() if method in METHODS else ():
        if other in out and name not in out:
            out[name] = out.pop(other)
    return out


def find_method(settings: Mapping[str, Any]) -> str:
    """The method that settings state, or whose entries they have; "" if neither tells it."""
    stated = settings.get("quant_method") or settings.get("method")
    if isinstance(stated, str):
        return stated
    if any(key in settings for key in OF_AWQ):
        return "awq"
    return "gptq" if any(key in settings for key in OF_GPTQ) else ""
