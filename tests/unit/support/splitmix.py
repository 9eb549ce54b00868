"""SplitMix64 in Python's integers, one number at a time: the reference of `inferplane.engine.sampling.rng`."""

from __future__ import annotations

import torch

from inferplane.engine.request.seeds import GAMMA, mix
from inferplane.engine.sampling.rng import BITS


def uniform_scalar(seed: int, counter: int, stream: int = 0, dtype: torch.dtype = torch.float32) -> float:
    """The number of one seed and counter, equal to the result of `uniform` to the last bit.

    Args:
        seed: any integer; taken modulo 2^64.
        counter: which number of the seed's sequence, from 0.
        stream: as for `uniform`.
        dtype: as for `uniform`.
    """
    start = mix(mix(seed) + stream * GAMMA)
    bits = BITS[dtype]
    return float((mix(start + (counter + 1) * GAMMA) >> (64 - bits)) * 2.0**-bits)
