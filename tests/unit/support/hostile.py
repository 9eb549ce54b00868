"""Damaged checkpoints: how they are made, and what refusing one may cost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import struct
import sys
import time
from pathlib import Path

import torch

from inferplane.errors import CheckpointError
from inferplane.models import SafetensorsFolder
from inferplane.types.placement import WHOLE

MOST_BYTES = 64 * 2**20
MOST_S = 1.0
"""Of this process's own time; the longest takes half a second. A busy machine may double it: see `refused`."""


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def safetensors(header, data=b"", length=None):
    """A file's bytes; `header` is a dict or the header's own bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TWO = {"a": entry(), "b": entry("F16", (2, 2), (8, 16))}
GOOD = safetensors(TWO, bytes(range(16)))


def read_all(folder):
    """Open a folder and read every tensor into memory that is poisoned beside it."""
    source = SafetensorsFolder(folder)
    try:
        found = {}
        for name in source.names():
            shape, dtype = source.shape(name), source.dtype(name)
            n = 1
            for size in shape:
                n *= size
            room = torch.zeros(n * dtype.itemsize + 16, dtype=torch.uint8)
            out = room[: n * dtype.itemsize].view(dtype).view(shape)
            source.read_into(name, out, WHOLE)
            assert not room[n * dtype.itemsize :].any(), "read past its end"
            found[name] = out
        return found
    finally:
        source.close()


def _status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


@contextlib.contextmanager
def within_bounds():
    """What runs inside takes at most a second of processor time and 64 MB of memory at any moment."""
    linux = sys.platform.startswith("linux")
    if linux:
        gc.collect()
        gc.freeze()  # the next collection leaves out all that lives now, whose objects take a fifth of a second
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is given back, or taking it again would not show
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status("VmRSS")
    began = time.process_time()
    yield
    taken = time.process_time() - began
    assert taken <= MOST_S, f"{taken:.2f} s"
    if linux:
        grown = _status("VmHWM") - before
        assert grown <= MOST_BYTES, f"{grown / 2**20:.0f} MiB"


def attempt(call):
    """What it returns, and the CheckpointError it raises instead."""
    try:
        return call(), None
    except CheckpointError as error:
        return None, error


def refused(call):
    """The one typed error of a damaged checkpoint, raised within bounds at the first or, on a busy machine, the second
    attempt.
    """
    try:
        with within_bounds():
            _, error = attempt(call)
    except AssertionError:
        with within_bounds():
            _, error = attempt(call)
    assert error is not None, "it was accepted"
    assert error.what.endswith(".") and error.remedy, error
    return str(error)
