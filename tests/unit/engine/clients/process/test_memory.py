"""What an engine's process returns to the system when it has come to rest."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from inferplane.engine.clients.process.memory import memory_trimmer, share_heap

KIB = 1024
glibc = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")), reason="glibc's heaps alone"
)
HEAPS = """
import ctypes, io, os, re, tempfile, threading
from inferplane.engine.clients.process.memory import share_heap
{first}
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
here = threading.Barrier(4)
def work():
    here.wait()
    c.malloc(ctypes.c_size_t(1000))
    here.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
c.fopen.restype, name = ctypes.c_void_p, os.path.join(tempfile.mkdtemp(), "heaps")
file = ctypes.c_void_p(c.fopen(name.encode(), b"w"))
c.malloc_info(0, file), c.fclose(file)
print(len(re.findall("<heap ", open(name).read())))
"""


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@glibc
def test_threads_share_one_heap():
    def heaps(first: str) -> int:
        code = HEAPS.format(first=first)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert heaps("") > 1
    assert heaps("assert share_heap()") == 1


@glibc
def test_memory_freed_between_what_stays_is_returned():
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [c.malloc(ctypes.c_size_t(100 * KIB)) for _ in range(400)]  # each below what glibc asks the system for
    for block in blocks:
        ctypes.memset(block, 1, 100 * KIB)
    for block in blocks[:-1]:
        c.free(block)
    before = resident_bytes()
    memory_trimmer()()
    assert before - resident_bytes() > 300 * 100 * KIB
    c.free(blocks[-1])


def test_other_systems_have_nothing_to_trim(monkeypatch):
    def without(name: object) -> object:
        return object()

    monkeypatch.setattr(ctypes, "CDLL", without)
    assert memory_trimmer()() is None
    assert share_heap() is False
