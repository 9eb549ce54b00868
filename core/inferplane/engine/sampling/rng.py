"""Random numbers without state: the i-th number of a seed depends on the seed and i only.

The generator is SplitMix64: the state of a sequence after i steps is its start plus i times a constant, so no step
needs the previous one. A request's numbers therefore do not depend on its batch, on preemption or on the number of
rejected drafts, and all rows of a step draw in one pass on the device.

All arithmetic is on 64-bit integers modulo 2^64, which every device computes alike; the upper bits become an exact
binary fraction.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, doi 10.1145/2660193.2660195;
its mixing function is variant 13 of Stafford's search, it passes BigCrush.
"""

from __future__ import annotations

import torch

from inferplane.engine.request.seeds import GAMMA, LAST_SHIFT, MASK, MIX, as_int64

BITS = {torch.float32: 24, torch.float64: 53}
"""Random bits per number: the dtype represents them exactly, so no number is rounded up to 1."""


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's shift fills with the sign."""
    return (z >> bits) & (MASK >> bits)


def _mix_tensor(z: torch.Tensor) -> torch.Tensor:
    """`seeds.mix` of int64 tensors, entry by entry."""
    for shift, factor in MIX:
        z = (z ^ _shift(z, shift)) * as_int64(factor)
    return z ^ _shift(z, LAST_SHIFT)


def uniform(
    seeds: torch.Tensor, counters: torch.Tensor, stream: int | torch.Tensor = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One random number per row, uniform over the multiples of 2^-24 (float32) or 2^-53 (float64) in [0, 1).

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
