"""The calibration methods of core, by the names that `inferplane quantize --method` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from inferplane.calibrate.methods.awq import awq
from inferplane.calibrate.methods.gptq import gptq
from inferplane.calibrate.methods.quantease import quantease
from inferplane.calibrate.methods.rounding import round_to_nearest, search_clip
from inferplane.calibrate.methods.smoothing import pss, search_smooth
from inferplane.calibrate.recipe import Channels, Method, WeightToRound
from inferplane.calibrate.rotations import Rotation
from inferplane.errors import PluginError
from inferplane.models.registry import resolve
from inferplane.types import QTensor


def make_nearest() -> Method:
    """Round to nearest."""
    return Method("round", lambda product: round_to_nearest(product.weight, product.format), "round to nearest")


def make_clip() -> Method:
    """Round to nearest with the range of each group that has the smallest error, columns weighed by their inputs."""

    def run(product: WeightToRound) -> QTensor:
        return search_clip(product.weight, product.format, product.inputs.power)

    return Method("round", run, "round to nearest, with the range of each group that loses least")


def make_gptq() -> Method:
    """GPTQ: columns in the order of their inputs' power, the error of each made up for by those that follow."""

    def run(product: WeightToRound) -> QTensor:
        hessian = product.inputs.hessian
        if hessian is None or not hessian.rows:
            return round_to_nearest(product.weight, product.format)
        return gptq(product.weight, hessian, product.format).weight

    return Method("round", run, "GPTQ, arXiv 2210.17323", needs_hessian=True)


def make_quantease() -> Method:
    """GPTQ, and then entries and scales chosen anew, each while the others stay."""

    def run(product: WeightToRound) -> QTensor:
        hessian = product.inputs.hessian
        if hessian is None or not hessian.rows:
            return round_to_nearest(product.weight, product.format)
        return quantease(product.weight, hessian, product.format)

    return Method("round", run, "QuantEase, arXiv 2309.01885, begun from GPTQ", needs_hessian=True)


def make_shift() -> Method:
    """Outlier Suppression+'s shift."""

    def run(least: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return ((largest + least) / 2).mean(0)

    return Method("shift", run, "centres of channels, Outlier Suppression+, arXiv 2304.09145")


def make_smoothquant() -> Method:
    """SmoothQuant with the exponent that has the smallest error."""

    def run(channels: Channels) -> torch.Tensor:
        return search_smooth(channels.trial(), channels.act_max(), channels.weight_max())

    return Method("scale", run, "SmoothQuant, arXiv 2211.10438, with a searched exponent")


def make_pss() -> Method:
    """Piecewise smooth search."""

    def run(channels: Channels) -> torch.Tensor:
        return pss(channels.trial(), channels.act_max(), channels.weight_max(), seed=channels.seed)

    return Method("scale", run, "piecewise smooth search")


def make_awq() -> Method:
    """AWQ's scales."""

    def run(channels: Channels) -> torch.Tensor:
        return awq(channels.trial(quantizes_inputs=False), channels.act_mean())

    return Method("scale", run, "AWQ, arXiv 2306.00978")


def make_rotate() -> Method:
    """Randomized Hadamard rotations."""
    return Method("rotate", Rotation, "randomized Hadamard rotations, QuaRot, arXiv 2404.00456")


def load_methods(targets: Mapping[str, str | Callable[..., Any]]) -> dict[str, Method]:
    """The methods behind what plugins registered (`PluginHost.calibration`).

    Raises:
        PluginError: one is no method.
    """
    found = {}
    for name, target in targets.items():
        method = resolve(target)()
        if not isinstance(method, Method):
            raise PluginError(
                f"Calibration method {name!r} is a {type(method).__name__}.",
                remedy="return an inferplane.calibrate.Method",
            )
        found[name] = method
    return found
