"""AWQ: scales that protect the weights of channels with large inputs, where activations are not quantized.

Source: Lin et al., arXiv 2306.00978.
"""

from __future__ import annotations

import torch

from inferplane.calibrate.methods.smoothing import Trial

STEPS = 20
LEAST = 1e-4


def awq(trial: Trial, act_mean: torch.Tensor) -> torch.Tensor:
    """The scale `act_mean^r`, divided by the root of its smallest and largest entry, with the r from 0 to 0.95 that has
    the smallest error; 1 if none is better than that.

    Args:
        trial: measures a scale.
        act_mean: mean magnitudes of each channel's inputs, `[C]`.

    Returns:
        `[C]`, positive.
    """
    best = torch.ones_like(act_mean)
    least = trial.loss(best)
    for step in range(STEPS):
        scale = act_mean.clamp_min(LEAST) ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        if (loss := trial.loss(scale)) < least:
            best, least = scale, loss
    return best
