"""Rotary settings of a config from a GGUF file's metadata and its tensors of rotary factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from inferplane.errors import UnsupportedModelError
from inferplane.gguf.metadata import Metadata, decimal

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of every published Llama 3. Files do not state them, but the factors that they give."""
MAX_FACTORS = 4096


def rotary(meta: Metadata, theta: float = 10000.0, dim: int | None = None) -> dict[str, Any]:
    """The entries of `rope_parameters`.

    Args:
        meta: the file's metadata.
        theta: the base if the file states none.
        dim: entries a head; None: as the file states it. If fewer are rotated, that is a setting, too.

    Raises:
        CheckpointError: an entry is not what it has to be.
        UnsupportedModelError: the type is not known.
    """
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base", theta)}
    dim = dim or meta.head_dim
    rotated = meta.size("rope.dimension_count", dim)
    if rotated != dim:
        out["partial_rotary_factor"] = rotated / dim
    kind = meta.text("rope.scaling.type", "none")
    if kind == "linear":
        out |= {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    elif kind == "yarn":
        out |= _yarn(meta)
    elif kind not in ("none", "longrope"):
        raise UnsupportedModelError(
            f"{meta.where} scales positions by {kind!r}, which is not read.", there_is="none, linear, longrope, yarn"
        )
    if LONG in meta.tensors and SHORT in meta.tensors:
        out |= {
            "rope_type": "longrope",
            "long_factor": _factors(meta, LONG, rotated),
            "short_factor": _factors(meta, SHORT, rotated),
            "original_max_position_embeddings": meta.size("rope.scaling.original_context_length"),
        }
    elif FREQUENCIES in meta.tensors:
        out |= _by_frequency(_factors(meta, FREQUENCIES, rotated), out["rope_theta"], rotated)
    return out


def _yarn(meta: Metadata) -> dict[str, Any]:
    """YaRN's settings; llama.cpp's defaults of those that are left out are those of transformers."""
    out: dict[str, Any] = {"rope_type": "yarn", "factor": meta.number("rope.scaling.factor")}
    if meta.has("rope.scaling.original_context_length"):
        out["original_max_position_embeddings"] = meta.size("rope.scaling.original_context_length")
    for stated, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if meta.has(f"rope.scaling.{stated}"):
            out[name] = meta.number(f"rope.scaling.{stated}")
    return out


def _factors(meta: Metadata, name: str, rotated: int) -> list[float]:
    """The factors that a tensor has, one for each pair of rotated entries."""
    shape = meta.tensors[name]
    if shape != (rotated // 2,) or rotated > MAX_FACTORS:
        raise meta.wrong(f"a tensor {name!r} of {rotated // 2} numbers", f"shape {list(shape)}")
    found = meta.read(name)
    if not all(math.isfinite(factor) and factor > 0 for factor in found):
        raise meta.wrong(f"{name} with numbers above 0", found[0])
    return [decimal(factor) for factor in found]


def _by_frequency(factors: Sequence[float], theta: float, dim: int) -> dict[str, Any]:
    """The settings that divide each frequency by its factor: those of Llama 3, or the factors themselves."""
    if all(factor == 1.0 for factor in factors):
        return {}
    most = max(factors)
    expected = [_llama3_factor(theta ** (2 * i / dim), most, *LLAMA3.values()) for i in range(dim // 2)]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected)):
        return {"rope_type": "llama3", "factor": most, **LLAMA3}
    return {
        "rope_type": "longrope",
        "long_factor": list(factors),
        "short_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
    }


def _llama3_factor(inverse: float, factor: float, low: float, high: float, context: float) -> float:
    """What divides a frequency `1 / inverse`. Source: transformers' modeling_rope_utils.py, "llama3"."""
    length = 2 * math.pi * inverse
    if length < context / high:
        return 1.0
    if length > context / low:
        return factor
    smooth = (context / length - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
