"""Tables of rotary position embeddings, for every kind of scaling that configs name."""

from __future__ import annotations

import math
from typing import Any

import torch

from inferplane.errors import CheckpointError, UnsupportedModelError, warn
from inferplane.models.reading.config import is_number
from inferplane.types import Weight

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("factor", "original_max_position_embeddings"),
}
"""Entries that a type requires besides `rope_theta`; each is a number above 0."""

_KNOWN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
"""Further entries that a scaled type may have; each is a number above 0."""

MIN_ENTRY, MAX_ENTRY = 1e-6, 1e12
"""Range of an entry that must be above 0. Beyond it the table or the scale of the softmax would overflow."""


def rope_table(rope: dict[str, Any], dim: int, positions: int) -> Weight:
    """Declare the cosines and sines as a weight that is computed at load: float32 `[positions, 2, dim / 2]`.

    Args:
        rope: `rope_type`, `rope_theta` and the type's own entries, as `Config.rope` gives them, with
            `max_position_embeddings` where the type needs it.
        dim: rotated entries per head.
        positions: number of positions in the table.

    Raises:
        UnsupportedModelError: the type is not implemented, or scales the rotation of a part of each head.
        CheckpointError: an entry that the type requires is missing or out of range, or `dim` is odd.

    Warns about a `partial_rotary_factor` without scaling, which these families ignore in transformers too, and about
    "longrope" beyond the original context (docs/decisions/0008).
    """
    kind = rope["rope_type"]
    if kind not in TYPES:
        raise UnsupportedModelError(
            f"Rotary scaling of type {kind!r} is not implemented.",
            there_is=", ".join(TYPES),
            remedy="load a checkpoint with one of these",
        )
    share = rope.get("partial_rotary_factor", 1)
    if share != 1 and kind != "default":
        raise UnsupportedModelError(
            f"Rotary scaling of type {kind!r} on a share of a head (partial_rotary_factor = {share!r}) is not "
            "implemented; transformers cannot run it in this family either.",
            there_is="scaling for whole heads",
            remedy="remove partial_rotary_factor from the config if the model rotates whole heads",
        )
    if share != 1:
        warn(f"partial_rotary_factor = {share!r} is not applied: this family rotates whole heads, as in transformers.")
    _check_settings(rope, dim)
    if kind == "longrope" and positions > (context := rope["original_max_position_embeddings"]):
        warn(
            f"Rotary scaling of type 'longrope': all sequences use the factors for more than {context} tokens, because "
            f"the model is to run with up to {positions}. For shorter sequences alone pass max_model_len={context}."
        )

    def make() -> torch.Tensor:
        frequency, factor = frequencies(rope, dim, positions)
        angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
        context = rope["max_position_embeddings"] if kind == "dynamic" else positions
        if positions > context:
            last = torch.arange(context, positions)
            angle[context:] = last[:, None] * _dynamic_frequencies(rope, dim, last + 1)
        table = torch.empty(positions, 2, dim // 2)  # filled by halves: a copy would double the memory
        table[:, 0] = angle.cos()
        table[:, 1] = angle.sin()
        return table.mul_(factor)

    return Weight((), (positions, 2, dim // 2), torch.float32, make=make)


def resting_table(dim: int, positions: int) -> Weight:
    """Declare a table that turns nothing, for layers without rotary positions in the form of those that have them.

    Args:
        dim: entries per head that are turned by zero.
        positions: number of positions in the table.

    Raises:
        CheckpointError: `dim` is odd.
    """
    _check_settings({"rope_type": "default", "rope_theta": 1.0}, dim)
    row = torch.tensor([[1.0], [0.0]])
    return Weight(
        (), (positions, 2, dim // 2), torch.float32, make=lambda: row.expand(positions, 2, dim // 2).contiguous()
    )


def _check_settings(rope: dict[str, Any], dim: int) -> None:
    """Raise CheckpointError if no table can be computed from these settings."""
    if dim % 2:
        raise CheckpointError(
            f"Rotary positions turn pairs of entries, but {dim} entries of a head are to be rotated.",
            remedy="check the config's head_dim, or qk_rope_head_dim",
        )
    kind = rope["rope_type"]
    needed = ("rope_theta", *_NEEDED[kind])
    if kind == "yarn" and rope.get("original_max_position_embeddings") is None:
        needed += ("max_position_embeddings",)
    known = [key for key in _KNOWN if kind != "default" and rope.get(key) is not None]
    for key in (*needed, *known):
        if not is_number(rope.get(key)) or not MIN_ENTRY <= rope[key] <= MAX_ENTRY:
            raise _wrong_entry(rope, key, f"a number from {MIN_ENTRY:g} to {MAX_ENTRY:g}")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        found = rope.get(key) or ()
        numbers = isinstance(found, (list, tuple)) and all(is_number(x) and MIN_ENTRY <= x <= MAX_ENTRY for x in found)
        if not numbers or len(found) != dim // 2:
            raise _wrong_entry(rope, key, f"a list of {dim // 2} numbers, one a pair of entries")
    for key in ("mscale", "mscale_all_dim") if kind != "default" else ():
        if rope.get(key) is not None and not (is_number(rope[key]) and 0 <= rope[key] <= MAX_ENTRY):
            raise _wrong_entry(rope, key, f"a number from 0 to {MAX_ENTRY:g}")
    if kind == "dynamic" and dim < 4:
        raise CheckpointError(
            f"Rotary scaling of type 'dynamic' needs more than {dim} rotated entries a head.",
            there_is="4 or more",
            remedy="correct the config's rotary settings",
        )
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise _wrong_entry(rope, "high_freq_factor", f"above low_freq_factor = {rope['low_freq_factor']!r}")
    for key in {"yarn": ("rope_theta",), "longrope": ("original_max_position_embeddings",)}.get(kind, ()):
        if rope[key] <= 1:
            raise _wrong_entry(rope, key, "a number above 1")


def _wrong_entry(rope: dict[str, Any], key: str, want: str) -> CheckpointError:
    found = f"has {key} = {rope[key]!r}" if rope.get(key) is not None else f"lacks {key!r}"
    return CheckpointError(
        f"Rotary scaling of type {rope['rope_type']!r} {found}; it must be {want}.",
        remedy="correct rope_scaling (or rope_parameters) in the config, or fetch the file again",
    )


def frequencies(rope: dict[str, Any], dim: int, positions: int = 0) -> tuple[torch.Tensor, float]:
    """Return the radians per position of each pair, float32 `[dim / 2]`, and the factor on cosines and sines.

    Source: RoFormer, arXiv 2104.09864; linear: arXiv 2306.15595; YaRN: arXiv 2309.00071; llama3: the scaling that the
    Llama 3.1 model card describes; longrope: arXiv 2402.13753.
    """
    base = torch.pow(float(rope["rope_theta"]), torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / base
    kind = rope["rope_type"]
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3_frequencies(plain, rope), 1.0
    if kind == "yarn":
        return _yarn_frequencies(base, rope, dim), yarn_factor(rope)
    if kind == "longrope":
        stretch = "long_factor" if positions > rope["original_max_position_embeddings"] else "short_factor"
        return plain / torch.tensor(rope[stretch], dtype=torch.float32), _longrope_factor(rope)
    return plain, 1.0


def _dynamic_frequencies(rope: dict[str, Any], dim: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the radians per position of each pair, `[n, dim / 2]`, for sequences of `tokens` `[n]` tokens.

    The sequences are longer than the context, and the base grows with their length. In transformers a token's rotation
    depends on how its prompt was divided into chunks. Here each token is rotated as if it came last, as transformers
    does when it decodes token by token (docs/decisions/0008).

    Source: the scaling called NTK-aware with a dynamic factor; transformers' modeling_rope_utils.py.
    """
    factor, context = rope["factor"], rope["max_position_embeddings"]
    grown = (factor * tokens.double() / context - (factor - 1)) ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return ((rope["rope_theta"] * grown[:, None]) ** -exponent).float()


def _llama3_frequencies(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Stretch long waves by `factor`, leave short ones, and blend between by how often they rotate in the context."""
    rotations = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * ((1 - blend) / factor + blend)


def _yarn_frequencies(base: torch.Tensor, rope: dict[str, Any], dim: int) -> torch.Tensor:
    """Leave pairs that rotate often in the original context, stretch slow ones, with a ramp between them."""
    theta, factor = float(rope["rope_theta"]), rope["factor"]
    context = rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]

    def pair_that_rotates(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_rotates(rope.get("beta_fast", 32)), pair_that_rotates(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return (1.0 / (factor * base)) * stretch + (1.0 / base) * (1 - stretch)


def _longrope_factor(rope: dict[str, Any]) -> float:
    """Return LongRoPE's factor on cosines and sines."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, context = rope["factor"], rope["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention temperature, `0.1 weight ln(factor) + 1` for factors above 1.

    Source: arXiv 2309.00071, section 3.4.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_factor(rope: dict[str, Any]) -> float:
    """Return YaRN's factor on cosines and sines."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["factor"], rope["mscale"]) / mscale(rope["factor"], rope["mscale_all_dim"])
    return mscale(rope["factor"])
