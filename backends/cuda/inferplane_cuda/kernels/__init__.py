"""Kernels for NVIDIA GPUs: composed from torch's own operators, portable Triton, Hopper's own, other libraries'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.composed import composed_kernels
from inferplane.kernels.triton import Launch, Tiles, triton_kernels
from inferplane.plugin import Context, Kernel, When
from inferplane_cuda.kernels import providers
from inferplane_cuda.kernels.needs import HEADS_128, MANY, NO_WINDOW, RANK_UNPROVED, V3_HEADS, V3_LATENTS
from inferplane_cuda.kvcache import NAMES, TOKEN_SCALED
from inferplane_cuda.tuning import measured, ranked

AMPERE = Tiles(prefill=Launch(64, 32, 4, 2), decode=Launch(16, 64, 4, 3), mla=Launch(16, 32, 8, 2))
"""Fits the 99 KiB of shared memory that a program may have on sm86 and sm89."""

HOPPER = Tiles(prefill=Launch(128, 64, 8, 3), decode=Launch(16, 64, 4, 4), mla=Launch(16, 64, 8, 2))
"""For sm90 and sm100, where a program may have 227 KiB."""


def tiles(op: Any, ctx: Context) -> Tiles:
    """Tile sizes for what the context says of the GPU."""
    large = any(name in ctx.features and ctx.features[name].present for name in ("sm90a", "sm100a"))
    return HOPPER if large else AMPERE


FP8_ERROR = 0.06
"""Of queries and of weights in FP8, each number of which may be off by 1/16."""
HOPPER_FOLDER = "inferplane_cuda.kernels.hopper"
FEATURES = ("triton", "sm90a")


def hopper_kernels() -> list[Kernel]:
    """Kernels that take sm90a's own instructions, in Gluon."""

    def kernel(op: str, where: str, layouts: tuple[str, ...], *needs: Any, **options: Any) -> Kernel:
        when = When((torch.bfloat16,), kv_layouts=layouts, features=FEATURES, needs=needs)
        note = "not run on a GPU yet: taken by a pin, or where it was measured to be the fastest"
        return Kernel(op, "gluon", f"{HOPPER_FOLDER}.{where}", when, RANK_UNPROVED, note=note, **options)

    return [
        kernel("mla_absorbed", "launch:mla_absorbed", NAMES, V3_LATENTS, capture_safe=True),
        replace(
            kernel("mla_absorbed", "launch:mla_absorbed_fp8", (TOKEN_SCALED,), V3_LATENTS, capture_safe=True),
            provider="gluon_fp8",
            extra_error=FP8_ERROR,
            note="FP8 products; not run on a GPU yet",
        ),
        kernel("mla_expanded", "prompts:mla_expanded", NAMES, V3_LATENTS, V3_HEADS, needs_host_lens=True),
        kernel("attention", "prompts:attention", NAMES[:1], MANY, HEADS_128, NO_WINDOW, batch_invariant=True),
    ]


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    declared = [*composed_kernels(), *triton_kernels(NAMES, tiles), *hopper_kernels(), *providers.kernels()]
    return ranked(declared, measured())
