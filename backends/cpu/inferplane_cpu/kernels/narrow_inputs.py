"""Weights of 4 bits times activations of 8 or 4: what activations are rounded to, and which kernels do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inferplane_cpu.kernels.packing import prepare_input
from inferplane_cpu.native import INPUT_INT4, INPUT_INT8, INPUT_MXFP4

INT4_FORMATS = ("int4_group32", "int4_group64", "int4_group", "int4_row")


@dataclass(frozen=True)
class NarrowInput:
    """A way to round activations before they are multiplied by weights of 4 bits.

    Args:
        name: ends the names of kernels.
        format: of `ActivationQuant`. group: columns that share a scale; 0: one scale a token.
        weights: formats of weights.
        error: what rounding adds to the error of a result, relative to the largest.
        number: in csrc/structs.h.
    """

    name: str
    format: str
    group: int
    weights: tuple[str, ...]
    error: float
    number: int

    def options(self, products: int = 1) -> dict[str, Any]:
        """Options of kernels that round activations so before each of so many products that follow each other."""
        return {
            "quantizes_activations_to": self.format,
            "extra_error": self.error * products**0.5,
            "note": f"activations quantized to {self.format}",
            "prepare": prepare_input(self.number),
        }

    @property
    def needs(self) -> tuple[str, Callable[[Any], bool]]:
        """The condition on an op `linear`."""
        scales = f"a scale for {self.group} columns" if self.group else "a scale a token"
        return f"activations in {self.format} with {scales}, or unquantized", self._takes

    def _takes(self, op: Any) -> bool:
        act, wide = op.activation_quant, op.out_dtype not in (None, torch.bfloat16, torch.float32)
        return not wide and (act is None or (act.format == self.format and act.group == self.group))


NARROW_INPUTS = (
    NarrowInput("w4a8", "int8", 0, INT4_FORMATS, 0.03, INPUT_INT8),
    NarrowInput("w4a4", "int4", 0, INT4_FORMATS, 0.3, INPUT_INT4),
    NarrowInput("w4a4_mxfp4", "mxfp4", 32, ("mxfp4",), 0.3, INPUT_MXFP4),
)
