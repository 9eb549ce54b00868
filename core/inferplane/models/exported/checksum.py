"""A checksum that several threads compute: files of weights are read faster than one thread could check them."""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

PIECE_BYTES = 4 * 2**20
THREADS = 4


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the host, which the view holds."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def checksum(memory: memoryview) -> int:
    """CRC-32 of the CRC-32s of each `PIECE_BYTES` of memory, which several threads compute; of one piece its own."""
    pieces = [memory[at : at + PIECE_BYTES] for at in range(0, len(memory), PIECE_BYTES)]
    if len(pieces) <= 1:
        return zlib.crc32(memory)
    found = list(_threads().map(zlib.crc32, pieces))
    return zlib.crc32(struct.pack(f"<{len(found)}I", *found))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="inferplane-checksum")
