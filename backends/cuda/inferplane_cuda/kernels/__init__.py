"""Kernels for NVIDIA GPUs: those composed from torch's own operators, the portable Triton kernels, and Hopper's own."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.composed import composed_kernels
from inferplane.kernels.triton import Launch, Tiles, triton_kernels
from inferplane.plugin import Context, Kernel, When
from inferplane_cuda.kvcache import NAMES

AMPERE = Tiles(prefill=Launch(64, 32, 4, 2), decode=Launch(16, 64, 4, 3), mla=Launch(16, 32, 8, 2))
"""Fits the 99 KiB of shared memory that a program may have on sm86 and sm89."""

HOPPER = Tiles(prefill=Launch(128, 64, 8, 3), decode=Launch(16, 64, 4, 4), mla=Launch(16, 64, 8, 2))
"""For sm90 and sm100, where a program may have 227 KiB."""


def tiles(op: Any, ctx: Context) -> Tiles:
    """Tile sizes for what the context says of the GPU."""
    large = any(name in ctx.features and ctx.features[name].present for name in ("sm90a", "sm100a"))
    return HOPPER if large else AMPERE


RANK_UNPROVED = 40
"""Below the portable kernels: compiled and emulated, but not run on a GPU yet. Such a kernel is taken by a pin only."""

HOPPER_FOLDER = "inferplane_cuda.kernels.hopper"
FEATURES = ("triton", "sm90a")
V3_LATENTS = ("latents of 512 entries and rotated keys of 64", lambda op: (op.dims.latent, op.dims.rope) == (512, 64))
V3_HEADS = ("heads of 128 + 64 entries and values of 128", lambda op: (op.dims.nope, op.dims.value) == (128, 128))
MANY = ("many query tokens", lambda op: op.queries == "many")
HEADS_128 = ("heads of 128 entries", lambda op: (op.kv.dim, op.kv.v_dim) == (128, 128))
NO_WINDOW = ("no sliding window", lambda op: op.kv.window is None)


def hopper_kernels() -> list[Kernel]:
    """Kernels that take sm90a's own instructions, in Gluon."""

    def kernel(op: str, where: str, layouts: tuple[str, ...], *needs: Any, **options: Any) -> Kernel:
        when = When((torch.bfloat16,), kv_layouts=layouts, features=FEATURES, needs=needs)
        note = "not run on a GPU yet: taken by a pin only"
        return Kernel(op, "gluon", f"{HOPPER_FOLDER}.{where}", when, RANK_UNPROVED, note=note, **options)

    return [
        kernel("mla_absorbed", "launch:mla_absorbed", NAMES, V3_LATENTS, capture_safe=True),
        kernel("mla_expanded", "prompts:mla_expanded", NAMES, V3_LATENTS, V3_HEADS, needs_host_lens=True),
        kernel("attention", "prompts:attention", NAMES[:1], MANY, HEADS_128, NO_WINDOW, batch_invariant=True),
    ]


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    return [*composed_kernels(), *triton_kernels(NAMES, tiles), *hopper_kernels()]
