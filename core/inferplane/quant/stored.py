"""What a config says of a quantized checkpoint: which tensors have which format, and how activations meet them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from inferplane.binding import FormatReader
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.quant.formats import READERS, SUFFIXES
from inferplane.types import PLAIN, STATIC

BLOCK = [128, 128]
UNREAD = ("*.input_scale", "*.activation_scale", "*.input_scale_ub", "*.k_scale", "*.v_scale")
"""Scales from calibration that not every checkpoint that has them is read with: what enters the cache gets scales while
running, and so do activations unless the config says that theirs are static."""
FP8_STATIC = "fp8" + STATIC


def _plain(name: str) -> str:
    return PLAIN


@dataclass(frozen=True)
class Stored:
    """How weights are stored, or quantized while they are read.

    Args:
        format_of: a checkpoint tensor's name -> its weight format.
        acts: weight format -> how activations are coded that meet such weights ("fp8", "fp8_static"); they stay as they
            are beside formats that are not named.
        readers: of the formats.
        unread: shell patterns of tensors that nothing reads.
    """

    format_of: Callable[[str], str] = _plain
    acts: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, FormatReader] = field(default_factory=lambda: READERS)
    unread: tuple[str, ...] = ()


def stored(settings: Mapping[str, Any] | None, names: Collection[str] | None) -> Stored:
    """What the config and the tensors' names say of a checkpoint.

    Args:
        settings: the config's `quantization_config`, or None.
        names: the checkpoint's tensors; None when there is no checkpoint (dummy weights), and the config alone decides.

    Raises:
        CheckpointError: the settings are no settings.
        UnsupportedModelError: a method that is not implemented.

    Source: DeepSeek-V3's README_WEIGHTS.md; the configs of compressed-tensors, vLLM's "fp8", fbgemm_fp8.
    """
    if settings is None:
        return Stored()
    if not isinstance(settings, Mapping):
        raise CheckpointError(
            f"The config's quantization_config is {settings!r}, not an object with entries.",
            remedy="correct the entry, or fetch the file again",
        )
    if not settings:
        return Stored()
    method = settings.get("quant_method")
    known = {"fp8": _fp8, "compressed-tensors": _compressed, "fbgemm_fp8": lambda s: ("fp8_row", "fp8")}
    found = known[method](settings) if isinstance(method, str) and method in known else None
    if found is None:
        block = settings.get("weight_block_size") or None
        raise UnsupportedModelError(
            f"Quantization method {method!r} with blocks {block} is not implemented, or not as it is set here.",
            there_is="'fp8' with weight_block_size [128, 128] or a scale a tensor, 'fbgemm_fp8', 'compressed-tensors' "
            "with FP8 weights in blocks of [128, 128] or with a scale a tensor or channel",
            remedy="load an unquantized checkpoint, or add a plugin that registers the format",
        )
    format, act = found

    def by_scales(name: str) -> str:
        return format if any(name + suffix in names for suffix in SUFFIXES) else PLAIN  # type: ignore[operator]

    def by_config(name: str) -> str:
        parts = name.removesuffix(".weight").split(".")
        expert = "experts" in parts and parts[-1] in ("w1", "w2", "w3")
        inside = "self_attn" in parts or "mlp" in parts
        return format if expert or (inside and parts[-1].endswith(("_proj", "_proj_with_mqa"))) else PLAIN

    return Stored(by_config if names is None else by_scales, {format: act} if act else {}, unread=UNREAD)


def format_of(settings: Mapping[str, Any] | None, names: Collection[str] | None) -> Callable[[str], str]:
    """A function from a checkpoint tensor's name to its weight format; arguments and errors are those of `stored`."""
    return stored(settings, names).format_of


def _fp8(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    block, scheme = settings.get("weight_block_size") or [], settings.get("activation_scheme")
    if block in (BLOCK, tuple(BLOCK)):
        return "fp8_block", "fp8" if scheme == "dynamic" else ""
    return None if block else ("fp8_row", {"dynamic": "fp8", "static": FP8_STATIC}.get(str(scheme), ""))


def _compressed(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Of groups that are all FP8 and all alike."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return None
    found = {_group(group) for group in groups.values()}
    return found.pop() if len(found) == 1 else None


def _group(group: Any) -> tuple[str, str] | None:
    if not isinstance(group, Mapping):
        return None
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not _is_fp8(weights) or not (inputs is None or _is_fp8(inputs)):
        return None
    strategy, act = weights.get("strategy"), _act(inputs)
    if act is None:
        return None
    if strategy == "block":
        act = "" if act == FP8_STATIC else act
        return ("fp8_block", act) if weights.get("block_structure") in (BLOCK, tuple(BLOCK)) else None
    return ("fp8_row", act) if strategy in ("tensor", "channel") else None


def _act(inputs: Mapping[str, Any] | None) -> str | None:
    """How activations are coded; None: in a way that is not implemented. What is not said to be dynamic is static."""
    if inputs is None or inputs.get("dynamic") is True:
        return "" if inputs is None else "fp8"
    return FP8_STATIC if not inputs.get("dynamic") and inputs.get("strategy", "tensor") == "tensor" else None


def _is_fp8(numbers: Any) -> TypeGuard[Mapping[str, Any]]:
    if not isinstance(numbers, Mapping) or numbers.get("symmetric") is False:
        return False
    return (numbers.get("type"), numbers.get("num_bits")) == ("float", 8)
