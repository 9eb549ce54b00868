"""Random numbers without state: the i-th number of a seed is a function of the two, and of nothing else.

The generator is SplitMix64, read anywhere: a sequence's state after i steps is its start plus i times a constant, so
that no step needs the one before it. That makes a request's numbers independent of its batch mates, of preemption, and
of how many were drawn for drafts that were rejected; and all rows of a step draw in one pass on the device.

Everything is 64-bit integer arithmetic modulo 2^64, which torch's int64 and Python's integers compute alike; the upper
bits become a fraction of two, exactly. So the two implementations here agree to the last bit, on any device.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, doi 10.1145/2660193.2660195;
its mixing function is variant 13 of Stafford's search, it passes BigCrush.
"""

from __future__ import annotations

import torch

from inferplane.engine.request.seeds import GAMMA, LAST_SHIFT, MASK, MIX, as_int64, mix

BITS = {torch.float32: 24, torch.float64: 53}
"""Random bits of a number: as many as the dtype holds exactly, so that none is rounded up to 1."""


def uniform_scalar(seed: int, counter: int, stream: int = 0, dtype: torch.dtype = torch.float32) -> float:
    """What `uniform` gives for one seed and counter, bit for bit.

    Args:
        seed: any integer; taken modulo 2^64.
        counter: which number of the seed's sequence, from 0.
        stream: as for `uniform`.
        dtype: as for `uniform`.
    """
    start = mix(mix(seed) + stream * GAMMA)
    bits = BITS[dtype]
    return float((mix(start + (counter + 1) * GAMMA) >> (64 - bits)) * 2.0**-bits)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own shift fills with the sign."""
    return (z >> bits) & (MASK >> bits)


def _mix_tensor(z: torch.Tensor) -> torch.Tensor:
    for shift, factor in MIX:
        z = (z ^ _shift(z, shift)) * as_int64(factor)
    return z ^ _shift(z, LAST_SHIFT)


def uniform(
    seeds: torch.Tensor, counters: torch.Tensor, stream: int | torch.Tensor = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One random number a row, uniform over the multiples of 2^-24 (float32) or 2^-53 (float64) in [0, 1).

    Args:
        seeds: int64 `[R]`.
        counters: int64 `[R]`: which number of each seed's sequence, from 0. Same device as `seeds`.
        stream: independent sequences of one seed, from 0: a second purpose takes another stream. Several at once as
            int64 `[S, 1]`, on the same device.
        dtype: float32 or float64.

    Returns:
        `[R]`, or `[S, R]`, of `dtype`, where `seeds` is.
    """
    offset = as_int64(stream * GAMMA) if isinstance(stream, int) else stream * as_int64(GAMMA)
    start = _mix_tensor(_mix_tensor(seeds) + offset)
    bits = BITS[dtype]
    drawn = _shift(_mix_tensor(start + (counters + 1) * as_int64(GAMMA)), 64 - bits)
    return drawn.to(dtype) * 2.0**-bits
