"""What an engine's process returns to the system when it has come to rest."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from inferplane.engine.process.memory import trimmer

KIB = 1024


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")), reason="glibc's heaps alone"
)
def test_memory_freed_between_what_stays_is_returned():
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [c.malloc(ctypes.c_size_t(100 * KIB)) for _ in range(400)]  # each below what glibc asks the system for
    for block in blocks:
        ctypes.memset(block, 1, 100 * KIB)
    for block in blocks[:-1]:
        c.free(block)
    before = resident_bytes()
    trimmer()()
    assert before - resident_bytes() > 300 * 100 * KIB
    c.free(blocks[-1])


def test_other_systems_have_nothing_to_trim(monkeypatch):
    def without(name: object) -> object:
        return object()

    monkeypatch.setattr(ctypes, "CDLL", without)
    assert trimmer()() is None
