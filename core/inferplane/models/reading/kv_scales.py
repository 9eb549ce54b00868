"""Calibrated scales of the KV cache in checkpoints: what the config states of them, and each layer's tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from inferplane.binding import TensorSource
from inferplane.errors import CheckpointError, first_of
from inferplane.files import AGAIN
from inferplane.types import Shard, Weight

ENTRIES = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method", "static_kv_dtype")
"""Entries of a quantization config that say how a cache was calibrated: of compressed-tensors and ModelOpt, of
ModelOpt, of Quark, of AutoRound."""
DTYPES = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "float8", "float8_e4m3fn", "torch.float8_e4m3fn"), "fp8"),
    **dict.fromkeys(("int8", "torch.int8"), "int8"),
}
"""What such an entry names -> the KV dtype."""
_SCALE = re.compile(
    r"(?P<layer>.*?\.?layers\.\d+)\.(?:self_attn|attn|attention|mixer)\."
    r"(?:(?:attn|mla_attn|qkv_proj|qkqkv_proj)\.)?"
    r"(?:(?P<of>[kv])_proj\.output_scale|(?:[kv]_proj\.)?(?P<one>[kv])_scale|(?P<both>kv)_scale)"
)
"""Names of scales: as compressed-tensors and AutoRound write them (`self_attn.k_scale`), ModelOpt
(`self_attn.k_proj.k_scale`), vLLM (`self_attn.attn.k_scale`, `kv_scale` for both) and AutoFP8
(`self_attn.k_proj.output_scale`).

Source: vllm-project/vllm, model_loader/weight_utils.py (maybe_remap_kv_scale_name), and its reader of
compressed-tensors.
"""
LAYER = re.compile(r"(.*?\.?layers\.\d+)\.")
"""The beginning of a tensor's name that names its layer."""


@dataclass(frozen=True)
class KVScales:
    """Calibrated scales of a checkpoint.

    Args:
        dtype: KV dtype that they were calibrated for, "fp8" or "int8"; "": they are of no use here.
        tensors: layer, such as "model.layers.0" -> names of the scales of K and of V.
        stated: the config's entry, in words; "" if it has none.
        why_not: why they are of no use, in words.
    """

    dtype: str
    tensors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stated: str = ""
    why_not: str = ""

    def serves(self, kv_dtype: str) -> bool:
        """Whether a cache of this dtype can use them."""
        return bool(self.tensors) and self.dtype == kv_dtype


def find_kv_scales(settings: Any, names: Collection[str]) -> KVScales | None:
    """The scales that a checkpoint states or has; None if it does neither.

    Args:
        settings: the config's `quantization_config`, or None.
        names: of the checkpoint's tensors.
    """
    tensors: dict[str, dict[str, str]] = {}
    matches = (found for name in sorted(names) if (found := _SCALE.fullmatch(name)) is not None)
    for found in sorted(matches, key=lambda found: found["one"] is None):  # a scale of its own before one for both
        for part in found["of"] or found["one"] or found["both"]:
            tensors.setdefault(found["layer"], {}).setdefault(part, found[0])
    stated = {key: settings[key] for key in ENTRIES if settings.get(key)} if isinstance(settings, Mapping) else {}
    if not stated:
        return KVScales("fp8", tensors) if tensors else None
    key, value = next(iter(stated.items()))
    dtype, why_not = _read_entry(value)
    if dtype and not tensors:
        why_not = "the checkpoint has no tensors with them"
    return KVScales(dtype, tensors, f"{key} = {str(value)[:100]}", why_not)


def of_export(stored: Mapping[str, Any]) -> KVScales:
    """The scales that an export holds (`Manifest.kv_scales`); `values_of_export` has their values."""
    layers = stored.get("layers")
    names = {layer: {"k": layer, "v": layer} for layer in layers} if isinstance(layers, Mapping) else {}
    return KVScales(str(stored.get("dtype", "")), names, "of the export")


def values_of_export(stored: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Each layer's scales of K and V in an export.

    Raises:
        CheckpointError: they are no positive numbers.
    """
    found = {}
    for layer, pair in dict(stored.get("layers") or {}).items():
        if not isinstance(pair, list) or not all(isinstance(x, float) for x in pair):
            raise CheckpointError(f"The export's scales of the KV cache of {layer} are {pair!r:.60}.", remedy=AGAIN)
        found[layer] = tuple(check_scale(layer, x) for x in pair)
    return found


def _read_entry(value: Any) -> tuple[str, str]:
    """The KV dtype of an entry of the config, and else why it is of no use."""
    if not isinstance(value, Mapping):
        dtype = DTYPES.get(str(value).lower(), "")
        return dtype, "" if dtype else f"caches in {str(value)[:40]!r} are not read"
    bits, kind = value.get("num_bits", 8), value.get("type", "float")
    if bits != 8 or kind not in ("float", "int"):
        return "", f"caches of {bits!s:.10} bits, type {kind!r:.20}, are not read"
    if value.get("dynamic"):
        return "", "they are computed while running"
    if value.get("symmetric") is False:
        return "", "they have zero points beside them"
    return ("fp8" if kind == "float" else "int8"), ""


class HasWeights(Protocol):
    """An op, or several of a layer."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See `Op.weights`."""


def find_layer(layer: HasWeights) -> str:
    """The name of a layer in its checkpoint, such as "model.layers.0"; "" for one without a number."""
    for _, weight in layer.weights():
        for part in weight.parts:
            if found := LAYER.match(part):
                return found[1]
    return ""


def read_kv_scales(source: TensorSource, found: KVScales, heads: int) -> dict[str, tuple[float, ...]]:
    """Each layer's scale of K, and of V where it has one. Of scales a head, the largest of the layer.

    Args:
        source: the checkpoint's tensors.
        found: which of them are scales.
        heads: KV heads of a layer, in all ranks together.

    Raises:
        CheckpointError: a scale has another shape, or is no positive number; a layer has none of K.
    """
    lacking = [layer for layer, names in found.tensors.items() if "k" not in names]
    if lacking:
        raise lacks_scales(lacking)
    return {
        layer: tuple(_read_scale(source, names[part], heads) for part in "kv" if part in names)
        for layer, names in found.tensors.items()
    }


def lacks_scales(layers: Sequence[str]) -> CheckpointError:
    """The error for layers that lack scales which others have."""
    return CheckpointError(
        f"{len(layers)} layer(s) lack a scale of the KV cache that others have, of K or of V: {first_of(layers)}.",
        remedy="fetch the checkpoint again, or leave kv_cache_dtype out",
    )


def _read_scale(source: TensorSource, name: str, heads: int) -> float:
    shape, dtype = source.shape(name), source.dtype(name)
    remedy = "leave kv_cache_dtype out, or load a checkpoint that was calibrated anew"
    if shape is None or dtype is None or not dtype.is_floating_point or math.prod(shape) not in (1, heads):
        what = f"{name}, a scale of the KV cache, has shape {list(shape or ())} and dtype {dtype}."
        raise CheckpointError(what, there_is=f"one number, or one for each of {heads} KV heads", remedy=remedy)
    value = torch.empty(shape, dtype=dtype)
    source.read_into(name, value, Shard())
    number = check_scale(name, value.float().amax().item())
    if not bool((value > 0).all()):
        check_scale(name, value.float().amin().item())
    return number


def check_scale(name: str, value: float) -> float:
    """Return a scale; raise CheckpointError if it is no positive finite number."""
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(
            f"{name}, a scale of the KV cache, is {value}.",
            there_is="positive numbers",
            remedy="leave kv_cache_dtype out, or load a checkpoint that was calibrated anew",
        )
    return value
