"""Packed integer weights of checkpoints: what the settings of GPTQ, AWQ and compressed-tensors say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferplane.errors import warn
from inferplane.ops import FORMATS
from inferplane.quant.unpack import IntegerPacking
from inferplane.types import PLAIN, ActivationQuant

GROUPS = {(8, 0): "int8_row", (8, 128): "int8_group", (4, 0): "int4_row"} | {
    (4, 128): "int4_group",
    (4, 64): "int4_group64",
    (4, 32): "int4_group32",
}
"""Integer weight formats by bits and the number of columns that share a scale; 0: the whole row."""
WIDER = {"int4_group": "int8_group", "int4_row": "int8_row"}
WIDER |= dict.fromkeys(("int4_group32", "int4_group64"), "int8_group32")
"""Formats for 4-bit entries with zero points, which are -15 to 15 from it. Scales of 64 columns are read as two."""


@dataclass(frozen=True)
class QuantScheme:
    """What settings state: a weight format, the quantization of activations, the packing of integers.

    `skipped_quant` says what activations are quantized to where that is not done here.
    """

    format: str
    activation_quant: ActivationQuant | None = None
    packed: IntegerPacking | None = None
    skipped_quant: str = ""


def find_integers(
    method: str, bits: Any, group: Any, symmetric: Any, *, less_one: bool = False, is_scattered: bool = False
) -> QuantScheme | None:
    """Packed integer weights; the group is -1 or None for a scale per row. Those of 8 bits with zero points, and of
    scattered columns, are expanded."""
    if not all(isinstance(x, int) for x in (bits, -1 if group is None else group, symmetric)):
        return None
    columns = 0 if group in (-1, None) else group
    format = GROUPS.get((bits, columns)) if columns or group != 0 else None
    if format is not None and ((is_scattered and columns) or (not symmetric and format not in WIDER)):
        return QuantScheme(PLAIN, packed=IntegerPacking(method, bits, columns, bool(symmetric), less_one, expands=True))
    if format is not None and not symmetric:
        format = WIDER[format]
    if format is None:
        return None
    repeats = columns // (FORMATS[format][2][1] or columns or 1) or 1
    return QuantScheme(format, packed=IntegerPacking(method, bits, columns, bool(symmetric), less_one, repeats))


def read_gptq(settings: Mapping[str, Any]) -> QuantScheme | None:
    """One scheme for all modules; for `dynamic` see `read_dynamic`. The format says how zero points are stored;
    exporters write it under one of two names, or both."""
    forms = {str(settings[key]) for key in ("checkpoint_format", "format") if settings.get(key)} or {"gptq"}
    form = forms.pop() if len(forms) == 1 else None
    if form not in ("gptq", "gptq_v2"):
        return None
    bits, group = settings.get("bits"), settings.get("group_size", 0)
    is_scattered = settings.get("desc_act") is True
    return find_integers(
        "gptq", bits, group, settings.get("sym", True), less_one=form == "gptq", is_scattered=is_scattered
    )


def read_awq(settings: Mapping[str, Any]) -> QuantScheme | None:
    """AutoAWQ's layout "gemm". It has stored zero points also with `zero_point` false, when they are all 8: kernels
    read them always, and AutoRound and GPTQModel write them so.

    Source: `WQLinear_GEMM` of AutoAWQ and AutoRound; AutoAWQ itself writes no checkpoint of this layout without zero
        points.
    """
    forms = {str(settings.get(key) or "gemm").lower() for key in ("version", "format", "checkpoint_format")}
    if forms != {"gemm"} or settings.get("backend") == "llm-awq" or settings.get("bits") != 4:
        return None
    return find_integers("awq", 4, settings.get("group_size", 0), settings.get("zero_point") is False)


def warn_of_expansion(packed: IntegerPacking | None) -> None:
    """Warn of weights that are expanded while they are read."""
    if packed is None or not packed.expands:
        return
    scattered = "columns that share a scale are scattered (desc_act, actorder)"
    why = "they have 8 bits and zero points" if packed.bits == 8 and not packed.symmetric else scattered
    warn(
        f"The checkpoint's quantized weights are expanded to 16 bits, because no kernel reads them: {why}. Pass "
        "quantization, such as weight_only_int8, to take less memory."
    )
