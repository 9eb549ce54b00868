"""AutoRound's settings, as those of the method whose packing its weights have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.errors import UnsupportedModelError

METHODS = ("auto-round", "auto_round", "intel/auto-round")
"""Names of the method; the last one is that of its first releases."""
DEFAULT = "auto_round:auto_gptq"
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}
GPTQ_V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "version": "gemm"}
PACKINGS = {
    "auto_round:auto_gptq": GPTQ,
    "auto_round:gptq": GPTQ,
    "auto_gptq": GPTQ,
    "auto": GPTQ,
    "auto_round:auto_awq": AWQ,
    "auto_round:awq": AWQ,
    "auto_awq": AWQ,
    "auto_round": GPTQ_V2,
    "auto_round:gptqmodel": GPTQ_V2,
}
"""Packing -> what it is called elsewhere. AutoRound's own has zero points as they are, GPTQ's less one."""
OF_KERNELS = (":exllamav2", ":tritonv2")
"""How packings may end that name a kernel beside the layout."""
PASSED_ON = ("packing_format", "backend", "extra_config")
"""Entries that this module reads, and the readers of other methods do not."""


def is_auto_round(settings: Mapping[str, Any]) -> bool:
    """Whether settings are AutoRound's."""
    return settings.get("quant_method") in METHODS


def translate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """AutoRound's settings as those of GPTQ or AWQ, without `extra_config` (`read_extra_config`).

    Raises:
        UnsupportedModelError: the packing is none of `PACKINGS`; or its name does not say how it stores zero points,
            and it has some.

    Source: `PACKINGS` and the packing of zero points are those of AutoRound 0.15's inference/backend.py and
        export_to_autoround/export.py; the default is that of transformers' `AutoRoundConfig`.
    """
    stated = settings.get("packing_format") or settings.get("backend")
    name = str(stated).lower().replace("autoround", "auto_round") if stated and stated != "auto" else DEFAULT
    layout = next((name.removesuffix(end) for end in OF_KERNELS if name.endswith(end)), name)
    found = PACKINGS.get(layout)
    symmetric, single = settings.get("sym", True), settings.get("extra_config") or {}
    has_zeros = symmetric is not True or (
        isinstance(single, Mapping)
        and any(isinstance(changes, Mapping) and changes.get("sym") is False for changes in single.values())
    )
    if found is None or (layout != name and found is GPTQ_V2 and has_zeros):
        raise UnsupportedModelError(
            f"The checkpoint's quantization_config of AutoRound has packing_format = {stated!r}"
            f"{' with zero points (sym false)' if found else ''}, which is not implemented.",
            there_is=f"{', '.join(map(repr, PACKINGS))}, of integers of 4 or 8 bits",
            remedy="export the model again in one of these formats, or in that of compressed-tensors (llm_compressor)",
        )
    rest = {key: value for key, value in settings.items() if key not in PASSED_ON}
    zeros = {"zero_point": symmetric is not True} if found is AWQ else {}
    return {**rest, **zeros, **found}
