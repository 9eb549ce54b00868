"""Which weight format and quantization of activations the settings of each method state for all weights alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from inferplane.ops import FORMATS
from inferplane.quant.integers import QuantScheme, find_integers, read_awq, read_gptq
from inferplane.quant.microscaling import MODELOPT, find_compressed
from inferplane.types import ActivationQuant

BLOCK = [128, 128]
FP8_BLOCKS = ActivationQuant("fp8", 128)
FP8_ROWS = ActivationQuant("fp8")
FP8_STATIC = ActivationQuant("fp8", static=True)
INT8_TOKENS = ActivationQuant("int8")
INT4_TOKENS = ActivationQuant("int4")
MXFP4_GROUPS = ActivationQuant("mxfp4", 32)
INTEGER_TOKENS = {8: INT8_TOKENS, 4: INT4_TOKENS}
"""Quantizations of activations to integers with a scale per token, by bits."""
DENSE = ("pack-quantized", "int-quantized", "naive-quantized", None)
"""Integer formats of compressed-tensors that can be read; others drop entries, or reorder them for a kernel."""


def find_scheme(settings: Mapping[str, Any]) -> QuantScheme | None:
    """What settings in the spelling of `spell` state; None: the method is not read here, or not with these settings."""
    known: Mapping[str, Callable[[Mapping[str, Any]], QuantScheme | None]] = {
        "fp8": _fp8,
        "compressed-tensors": _read_compressed,
        "fbgemm_fp8": lambda s: QuantScheme("fp8_row", FP8_ROWS),
        "gptq": read_gptq,
        "awq": read_awq,
        "modelopt": _modelopt,
    }
    method = settings.get("quant_method")
    return known[method](settings) if isinstance(method, str) and method in known else None


def _fp8(settings: Mapping[str, Any]) -> QuantScheme | None:
    block, scheme = settings.get("weight_block_size") or [], settings.get("activation_scheme")
    if block in (BLOCK, tuple(BLOCK)):
        return QuantScheme("fp8_block", FP8_BLOCKS if scheme == "dynamic" else None)
    return None if block else QuantScheme("fp8_row", {"dynamic": FP8_ROWS, "static": FP8_STATIC}.get(str(scheme)))


def _modelopt(settings: Mapping[str, Any]) -> QuantScheme | None:
    """ModelOpt with one `quant_algo` for all modules; those that are excluded the tensors' names show."""
    algo = settings.get("quant_algo")
    if algo == "FP8":
        return QuantScheme("fp8_row", FP8_STATIC)
    if not isinstance(algo, str) or algo not in MODELOPT:
        return None
    if settings.get("group_size") not in (None, FORMATS[MODELOPT[algo][0]][2][1]):
        return None
    if algo == "MXFP4":
        return QuantScheme("mxfp4", MXFP4_GROUPS)
    return QuantScheme(MODELOPT[algo][0], skipped_quant=MODELOPT[algo][1])


def _read_compressed(settings: Mapping[str, Any]) -> QuantScheme | None:
    """compressed-tensors with FP8, FP4 or integers; all groups must be alike."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return None
    found = {read_group(group, settings) for group in groups.values()}
    return found.pop() if len(found) == 1 else None


def read_group(group: Any, settings: Mapping[str, Any]) -> QuantScheme | None:
    """What one of the `config_groups` of compressed-tensors states; None: it is not read."""
    if not isinstance(group, Mapping):
        return None
    weights, inputs = group.get("weights"), group.get("input_activations")
    if (microscaled := find_compressed(group, settings)) is not None:
        format, skipped = microscaled
        if format == "mxfp4" and isinstance(inputs, Mapping) and _is_mxfp4(inputs):
            return QuantScheme(format, MXFP4_GROUPS)
        return QuantScheme(format, skipped_quant=skipped)
    if isinstance(weights, Mapping) and weights.get("type") == "int":
        return _integer_group(weights, inputs, settings)
    if not _is_fp8(weights) or not (inputs is None or _is_fp8(inputs)):
        return None
    strategy, dynamic = weights.get("strategy"), inputs is None or inputs.get("dynamic") is True
    if inputs is not None and not dynamic and (inputs.get("dynamic") or inputs.get("strategy", "tensor") != "tensor"):
        return None
    if strategy != "block" and inputs is not None and inputs.get("strategy") == "group":
        return None
    if strategy == "block":
        quant = FP8_BLOCKS if inputs is not None and dynamic else None
        return QuantScheme("fp8_block", quant) if weights.get("block_structure") in (BLOCK, tuple(BLOCK)) else None
    quant = None if inputs is None else FP8_ROWS if dynamic else FP8_STATIC
    return QuantScheme("fp8_row", quant) if strategy in ("tensor", "channel") else None


def _integer_group(weights: Mapping[str, Any], inputs: Any, settings: Mapping[str, Any]) -> QuantScheme | None:
    """Integers; activations are quantized per row, or not at all if the config requests a form that no kernel has."""
    if settings.get("format") not in DENSE:
        return None
    if inputs is not None and (not isinstance(inputs, Mapping) or inputs.get("type") != "int"):
        return None
    if inputs is not None and inputs.get("num_bits") not in INTEGER_TOKENS:
        return None
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        return None
    group = weights.get("group_size", 0) if strategy == "group" else None
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    is_scattered = weights.get("actorder") in ("group", "dynamic", True)
    found = find_integers("compressed-tensors", bits, group, symmetric, is_scattered=is_scattered)
    if found is not None and found.packed is not None and found.packed.expands:
        return found if settings.get("format") == "pack-quantized" else None
    if found is None or inputs is None:
        return found
    known = FORMATS[found.format][1] == bits and found.format != "int8_group"
    if known and _is_dynamic_by_token(inputs) and bits <= inputs["num_bits"]:
        return replace(found, activation_quant=INTEGER_TOKENS[inputs["num_bits"]])
    return replace(found, skipped_quant=_describe(inputs)) if bits == 4 or inputs["num_bits"] == 4 else found


def _is_mxfp4(inputs: Mapping[str, Any]) -> bool:
    """Whether activations are quantized to e2m1 with a power of two per 32 columns while running."""
    form = inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"), inputs.get("group_size")
    return form == ("float", 4, "group", 32) and inputs.get("dynamic") is True


def _is_dynamic_by_token(inputs: Mapping[str, Any]) -> bool:
    """Whether activations get a scale for each token while running, and no zero point."""
    is_plain = inputs.get("dynamic") is True and inputs.get("symmetric", True) is True
    return is_plain and inputs.get("strategy", "token") in ("token", "tensor")  # a scale of all tokens holds each one


def _describe(inputs: Mapping[str, Any]) -> str:
    how = "" if inputs.get("dynamic") is True else ", static"
    return f"{inputs.get('type')} of {inputs.get('num_bits')} bits{how}, by {inputs.get('strategy', 'token')}"


def _is_fp8(numbers: Any) -> TypeGuard[Mapping[str, Any]]:
    if not isinstance(numbers, Mapping) or numbers.get("symmetric") is False:
        return False
    return (numbers.get("type"), numbers.get("num_bits")) == ("float", 8)
