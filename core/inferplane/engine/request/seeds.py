"""Seeds of requests: signed 64-bit integers, as tensors and messages hold them. Without torch.

`mix` is the mixing function of SplitMix64; `sampling/rng.py` has the generator, its source, and the same in tensors.
"""

from __future__ import annotations

import secrets

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
"""Distance of two successive states: 2^64 divided by the golden ratio, odd."""
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def as_int64(value: int) -> int:
    """The signed 64-bit integer with the same bits as `value` modulo 2^64."""
    value &= MASK
    return value - 2**64 if value >> 63 else value


def mix(state: int) -> int:
    """The mixing function of SplitMix64: a state (taken modulo 2^64) -> a number from 0 to 2^64 - 1 whose bits look
    random.
    """
    state &= MASK
    for shift, factor in MIX:
        state = ((state ^ (state >> shift)) * factor) & MASK
    return state ^ (state >> LAST_SHIFT)


def fresh_seed() -> int:
    """A random seed from the operating system, a signed 64-bit integer."""
    return as_int64(secrets.randbits(64))


def child_seed(seed: int, index: int) -> int:
    """The seed of the sequence number `index` of a request's n sequences, a signed 64-bit integer: `seed` for index 0,
    else an independent one.
    """
    return as_int64(seed if index == 0 else mix(mix(seed & MASK) - index * GAMMA))
