"""64-bit integers, as tensors and messages hold them."""

MASK = 2**64 - 1


def as_int64(value: int) -> int:
    """The signed 64-bit integer with the same bits as `value` modulo 2^64."""
    value &= MASK
    return value - 2**64 if value >> 63 else value
