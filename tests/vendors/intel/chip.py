"""What of the card most operators check, and the attention kernels that the wheel holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.vendors import checks
from tests.vendors.checks import HALF, INT32, LIFTED, contiguous, dtype, half, shape
from tests.vendors.emulator import require

FLOATS = (*HALF, torch.float32)
BLOCKS = (16, 32, 64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_COMPILED = json.loads(Path(__file__).with_name("binary.json").read_text(encoding="utf-8"))["attention"]
PREFILL, SINK_PREFILL = ({tuple(entry) for entry in _COMPILED[f"prefill{more}"]} for more in ("", "_with_sinks"))
"""(head size, blocks, causal, window) of the kernels for many query tokens, without and with sinks."""
DECODE, SINK_DECODE = ({tuple(entry) for entry in _COMPILED[f"decode{more}"]} for more in ("", "_with_sinks"))
"""(query heads a tile, head size, tokens a block, window) of the kernels for single tokens, without and with sinks."""


def bucket(dim: int, sizes: set[int]) -> int:
    """The smallest compiled size that holds a head; 0 when none does."""
    return min((size for size in sizes if size >= dim), default=0)


def floats(**tensors: torch.Tensor) -> None:
    """All are of one float dtype."""
    found = {t.dtype for t in tensors.values()}
    require(len(found) == 1, f"{', '.join(tensors)} have one dtype, got {', '.join(sorted(map(str, found)))}")
    require(found <= set(FLOATS), f"{', '.join(tensors)} are float16, bfloat16 or float32, got {found}")


def absent(**values: Any) -> None:
    """None of these is given."""
    for name, value in values.items():
        checks.absent(name, value)


__all__ = ["HALF", "INT32", "LIFTED", "contiguous", "dtype", "half", "shape"]
