"""Weights and caches on huge pages: with small ones reading waits for addresses, most of all in a virtual machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import platform
import re
from collections import deque
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch

HUGE_PAGE_BYTES = 2**21
"""Bytes of a huge page of x86-64."""
ARENA_BYTES = 2**26
"""Bytes that are mapped at a time; what is never written takes no memory."""
MIN_BYTES = HUGE_PAGE_BYTES // 2
"""Tensors of fewer bytes are left where they are."""
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COLLAPSE = 25
"""MADV_COLLAPSE (Linux 6.1): small pages are copied to huge ones at once, and at the same address."""

MAX_FAILURES = 8
"""After so many pages in a row that could not be moved the system has no more, and each attempt costs a search."""


@cache
def has_huge_pages(enabled: Path = ENABLED) -> bool:
    """Whether the system gives huge pages on request; where its administrator switched them off it does not."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in enabled.read_text()
    except OSError:
        return False


class _Arena:
    """Memory for tensors that lie one behind the other; it is freed when the last of them is dropped."""

    def __init__(self) -> None:
        self._lock, self._mapping, self._used = Lock(), mmap.mmap(-1, mmap.PAGESIZE), mmap.PAGESIZE

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            if self._used + nbytes > len(self._mapping):
                self._mapping = mmap.mmap(
                    -1, max(ARENA_BYTES, nbytes) + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                )
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
                self._used = -_address(self._mapping) % HUGE_PAGE_BYTES
            first, self._used = self._used, self._used + -(-nbytes // 64) * 64
            return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=first)


_arena = _Arena()


def empty(*shape: int) -> torch.Tensor:
    """Bytes for a weight, `[*shape]`, aligned to 64 and on huge pages where there are any; not written."""
    found = _allocate(math.prod(shape))
    return torch.empty(shape, dtype=torch.uint8) if found is None else found.view(shape)


def copy(numbers: torch.Tensor) -> torch.Tensor:
    """A dense copy of numbers where `empty` gives bytes."""
    return empty(numbers.nbytes).view(numbers.dtype).view(numbers.shape).copy_(numbers)


def zeros(nbytes: int) -> torch.Tensor:
    """Zeros `[nbytes]` as `empty` gives bytes; what is not touched takes no memory."""
    found = _allocate(nbytes)  # never used before, so zeros
    return torch.from_numpy(np.zeros(nbytes, np.uint8)) if found is None else found


def _allocate(nbytes: int) -> torch.Tensor | None:
    """Bytes on huge pages; None where there are none."""
    if nbytes and has_huge_pages():
        with contextlib.suppress(OSError):  # where addresses are limited, the weight alone may fit
            return _arena.allocate(nbytes)
    return None


def move_to_huge_pages(memory: torch.Tensor) -> None:
    """Have a thread move a tensor's memory to huge pages; the pages at its ends move with whatever else lies there.

    Requests are done one after the other, and the caller does not wait. It is advice: what the system cannot move
    stays, and works.
    """
    storage = memory.untyped_storage()
    if storage.nbytes() >= MIN_BYTES and has_huge_pages():
        _mover.add(storage)


def wait_for_huge_pages(timeout_s: float = 60.0) -> bool:
    """Wait until every request of `move_to_huge_pages` is done; returns whether that was so in time."""
    thread = _mover.busy()
    if thread is not None:
        thread.join(timeout_s)
    return _mover.busy() is None


class _Mover:
    """Moves memory in a thread, which is there while there is something to move."""

    def __init__(self) -> None:
        self._lock, self._waiting = Lock(), deque[torch.UntypedStorage]()
        self.thread: Thread | None = None

    def add(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            self._waiting.append(storage)
            if self.thread is None:
                self.thread = Thread(target=self._work, name="huge pages", daemon=True)
                self.thread.start()

    def busy(self) -> Thread | None:
        with self._lock:
            return self.thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.thread = None
                    return
                storage = self._waiting.popleft()
            _move(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            del storage


_mover = _Mover()


def _move(first: int, last: int) -> None:
    if _collapses():
        begin, end = first // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, -(-last // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if _madvise()(begin, end - begin, COLLAPSE):  # it ended at one that cannot be moved, or not just now
            failed = 0
            for at in range(begin, end, HUGE_PAGE_BYTES):
                failed = failed + 1 if _madvise()(at, HUGE_PAGE_BYTES, COLLAPSE) else 0
                if failed == MAX_FAILURES:
                    return
    else:  # the system does it by and by
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise()(begin, last // mmap.PAGESIZE * mmap.PAGESIZE - begin, mmap.MADV_HUGEPAGE)


@cache
def _collapses() -> bool:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return release is not None and (int(release[1]), int(release[2])) >= (6, 1)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
