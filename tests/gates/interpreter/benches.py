"""A device made of Triton's interpreter: host memory, and every layout the portable kernels can look into."""

from __future__ import annotations

import torch

from inferplane.binding import Bench
from inferplane.kernels.triton import Launch, Tiles, triton_kernels
from inferplane.plugin import HOST, Features, paged_layout

LAYOUTS = (
    paged_layout(64),
    paged_layout(64, "fp8"),
    paged_layout(64, "fp8", power_of_two=True),
    paged_layout(64, "int8"),
    paged_layout(48),
    paged_layout(16, "fp8"),
)
NAMES = tuple(layout.name for layout in LAYOUTS)
TILES = Tiles(
    decode=Launch(16, 32),
    prefill=Launch(32, 32),
    mla=Launch(16, 32),
    chunk_tokens=64,
    splits=3,
    sparse=Launch(16, 32),
    index=Launch(8, 64),
    programs=8,
    select_tokens=256,
)  # so small that samples of a hundred tokens have several splits, and more keys than SPLITS chunks hold
KERNELS = triton_kernels(NAMES, TILES.prepare)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bench(dtype: torch.dtype, layout: str | None = None) -> Bench:
    return Bench("interpreter", HOST, dtype, Features(["triton", "fp8", "int8-dot"]), lambda request: LAYOUTS, layout)
