"""What is done to a layer before its weights are rounded, and how they are rounded: the methods, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from inferplane.calibrate.folds import Fold
from inferplane.calibrate.methods.smoothing import Trial
from inferplane.calibrate.observe import Inputs
from inferplane.calibrate.rotations import Rotation
from inferplane.errors import UsageError
from inferplane.types import ActivationQuant, QTensor


@dataclass(frozen=True)
class Channels:
    """Channels that a scale is chosen for: they are divided by it, and the weight's columns multiplied.

    Args:
        weight: the quantized products that read them, one below the other, `[N, K]` float32.
        inputs: what they are multiplied by.
        format: of the weight.
        quant: of the activations; None: they are not quantized.
        seed: of anything random.
        fold: which columns are one channel.
    """

    weight: torch.Tensor
    inputs: Inputs
    format: str
    quant: ActivationQuant | None
    seed: int
    fold: Fold

    def act_max(self) -> torch.Tensor:
        """Largest magnitude of each channel's inputs, `[C]`."""
        return self.fold.gather(self.inputs.largest)

    def act_mean(self) -> torch.Tensor:
        """Mean magnitude of each channel's inputs, `[C]`; the largest one where several columns are one channel."""
        return self.fold.gather(self.inputs.mean)

    def weight_max(self) -> torch.Tensor:
        """Largest magnitude of each channel's weights, `[C]`."""
        return self.fold.gather(self.weight.abs().amax(0))

    def trial(self, *, quantizes_inputs: bool = True) -> Trial:
        """Measures what quantization with a scale `[C]` costs."""
        quant = self.quant if quantizes_inputs else None
        return Trial(self.inputs.sample, self.weight, self.format, quant, self.fold.spread)


@dataclass(frozen=True)
class WeightToRound:
    """A weight that is to be rounded.

    Args:
        weight: `[N, K]` float32.
        inputs: what it is multiplied by.
        format: the format.
        quant: of the activations; None: they are not quantized.
    """

    weight: torch.Tensor
    inputs: Inputs
    format: str
    quant: ActivationQuant | None


Scale = Callable[[Channels], torch.Tensor]
"""Gives the scale of channels, `[C]`, positive."""
Shift = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives what is subtracted from channels, `[C]`, from the smallest and the largest of each in each window, `[W, C]`."""
Round = Callable[[WeightToRound], QTensor]
"""Rounds a weight to its format."""
Rotate = Callable[[int, int], Rotation]
"""Makes the rotation of a residual stream of so many channels, with a seed."""


@dataclass(frozen=True)
class Method:
    """A calibration method.

    Args:
        kind: "rotate" makes a rotation of the residual stream, "shift" chooses what is subtracted from channels,
            "scale" chooses scales of channels, "round" rounds weights.
        run: does it.
        about: what it is, in a line.
        needs_hessian: whether it reads `Inputs.hessian`.
    """

    kind: Literal["rotate", "shift", "scale", "round"]
    run: Rotate | Shift | Scale | Round
    about: str
    needs_hessian: bool = False


@dataclass(frozen=True)
class Recipe:
    """Methods by the kind of what they do.

    Args:
        names: as they were given.
        scale: chooses scales of channels; None: channels stay as they are.
        round: rounds weights.
        rotation: makes the rotation of the residual stream (`rotate`); None: it is not rotated.
        shift: chooses what is subtracted from channels; None: nothing is.
    """

    names: tuple[str, ...]
    scale: Method | None
    round: Method
    rotation: Method | None = None
    shift: Method | None = None

    @property
    def needs_hessian(self) -> bool:
        """Whether a method reads `Inputs.hessian`."""
        return self.round.needs_hessian or (self.scale is not None and self.scale.needs_hessian)


KINDS = {
    "rotate": "rotate the residual stream",
    "shift": "shift channels",
    "scale": "choose scales of channels",
    "round": "round weights",
}
"""What methods do, by kind."""


def make_recipe(names: Sequence[str], methods: Mapping[str, Method]) -> Recipe:
    """The methods of these names: one that rounds, `nearest` if none is given, and at most one each that rotates, that
    shifts channels, and that chooses scales.

    Raises:
        UsageError: a name is unknown, or two methods do the same.
    """
    chosen: dict[str, str] = {}
    for name in names:
        if name not in methods:
            listed = ", ".join(methods)
            raise UsageError(f"--method {name!r}.", there_is=listed, remedy="chain them with commas: smoothquant,gptq")
        kind = methods[name].kind
        if kind in chosen:
            what = KINDS[kind]
            raise UsageError(f"--method: {chosen[kind]} and {name} both {what}.", remedy="name one of them")
        chosen[kind] = name
    rounding = methods[chosen.get("round", "nearest")]
    others = (methods[chosen[kind]] if kind in chosen else None for kind in ("scale", "rotate", "shift"))
    scale, rotation, shift = others
    return Recipe(tuple(names), scale, rounding, rotation, shift)
