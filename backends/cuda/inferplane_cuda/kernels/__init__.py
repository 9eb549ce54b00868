"""Kernels for NVIDIA GPUs: composed from torch's own operators, portable Triton, Hopper's own, other libraries'."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.composed import composed_kernels
from inferplane.kernels.triton import Launch, Product, Products, Tiles, matrix_kernels, triton_kernels
from inferplane.kernels.triton.weight_packing import PACKING
from inferplane.plugin import Context, Kernel, When
from inferplane_cuda.kernels import providers
from inferplane_cuda.kernels.conditions import (
    FP8_ACTIVATIONS_128,
    FP8_BLOCK_EXPERTS,
    FP8_BLOCK_LINEAR,
    HEADS_128,
    MANY_QUERIES,
    NO_WINDOW,
    RANK_UNPROVED,
    V3_HEADS,
    V3_LATENTS,
)
from inferplane_cuda.kvcache import PAGED_NAMES, TOKEN_SCALED
from inferplane_cuda.tuning import load_measured, rank_measured

AMPERE = Tiles(
    prefill=Launch(64, 32, 4, 2), decode=Launch(16, 64, 4, 3), mla=Launch(16, 32, 8, 2), sparse=Launch(16, 32, 8, 2),
    index=Launch(16, 64, 4, 3), programs=108,
)  # fmt: skip
"""Fits the 99 KiB of shared memory that a program may have on sm86 and sm89."""

HOPPER = Tiles(
    prefill=Launch(128, 64, 8, 3), decode=Launch(16, 64, 4, 4), mla=Launch(16, 64, 8, 2), sparse=Launch(16, 64, 8, 2),
    index=Launch(16, 128, 8, 2), programs=132,
)  # fmt: skip
"""For sm90 and sm100, where a program may have 227 KiB."""


def _has(ctx: Context, name: str) -> bool:
    return name in ctx.features and bool(ctx.features[name].present)


def tiles(op: Any, ctx: Context) -> Tiles:
    """`Kernel.prepare` of the portable kernels: tile sizes for the GPU that the context describes."""
    large = _has(ctx, "sm90a") or _has(ctx, "sm100a")
    return replace(HOPPER if large else AMPERE, ahead=uses_dependent_launch(ctx))


DEPENDENT_LAUNCH_VARIABLE = "INFERPLANE_CUDA_AHEAD"
"""Environment variable: 1 launches small kernels before the one in front has ended. Off until it was measured."""


def uses_dependent_launch(ctx: Context) -> bool:
    """Whether dependent launches are requested and the GPU supports them."""
    return os.environ.get(DEPENDENT_LAUNCH_VARIABLE) == "1" and _has(ctx, "sm90")


AMPERE_PRODUCTS = Products(
    Product(16, 32, 4, 3), Product(64, 64, 4, 2), Product(64, 128, 8, 2), Product(32, 64, 4, 2), 108
)
HOPPER_PRODUCTS = Products(
    Product(16, 64, 4, 4), Product(64, 64, 4, 3), Product(128, 128, 8, 3), Product(64, 128, 8, 3), 132
)
BLACKWELL_PRODUCTS = replace(HOPPER_PRODUCTS, many=Product(64, 128, 8, 3))


def products(op: Any, ctx: Context) -> Products:
    """`Kernel.prepare` of the matrix products: tile sizes, and whether the GPU multiplies FP8 numbers."""
    large = {"sm90a": HOPPER_PRODUCTS, "sm100a": BLACKWELL_PRODUCTS}
    found = [p for name, p in large.items() if _has(ctx, name)]
    return replace(found[0] if found else AMPERE_PRODUCTS, fp8=_has(ctx, "fp8"), ahead=uses_dependent_launch(ctx))


FP8_ERROR = 0.06
"""Error of queries or activations in FP8, each number of which may be off by 1/16."""
FP8_ACTIVATIONS: dict[str, Any] = {"extra_error": FP8_ERROR, "quantizes_activations_to": "fp8"}
HOPPER_FOLDER = "inferplane_cuda.kernels.hopper"
FEATURES = ("triton", "sm90a")
NOT_RUN = "quantizes activations to FP8; not run on a GPU yet"
UNMEASURED = "not run on a GPU yet: taken by a pin, or where it was measured to be the fastest"


def hopper_kernels() -> list[Kernel]:
    """Kernels in Gluon that use sm90a's own instructions."""

    def kernel(op: str, where: str, layouts: tuple[str, ...], *needs: Any, **options: Any) -> Kernel:
        when = When((torch.bfloat16,), kv_layouts=layouts, features=FEATURES, needs=needs)
        return Kernel(op, "gluon", f"{HOPPER_FOLDER}.{where}", when, RANK_UNPROVED, note=UNMEASURED, **options)

    return [
        kernel("mla_absorbed", "mla_launch:mla_absorbed", PAGED_NAMES, V3_LATENTS, capture_safe=True),
        replace(
            kernel("mla_absorbed", "mla_launch:mla_absorbed_fp8", (TOKEN_SCALED,), V3_LATENTS, capture_safe=True),
            provider="gluon_fp8",
            extra_error=FP8_ERROR,
            note="FP8 products; not run on a GPU yet",
        ),
        kernel("mla_expanded", "prefill_launch:mla_expanded", PAGED_NAMES, V3_LATENTS, V3_HEADS, needs_host_lens=True),
        kernel("attention", "prefill_launch:attention", PAGED_NAMES[:1], MANY_QUERIES, HEADS_128, NO_WINDOW,
               batch_invariant=True),
        *hopper_products(),
    ]  # fmt: skip


def hopper_products() -> list[Kernel]:
    """Hopper's products with FP8 blocks, for ops that quantize activations to FP8, or checkpoints that ask for it; else
    by a pin.
    """

    def kernel(provider: str, note: str, *needs: Any, **options: Any) -> Kernel:
        when = When((torch.bfloat16,), ("plain", "fp8_block"), features=FEATURES, needs=(*needs, *FP8_BLOCK_LINEAR))
        where = f"{HOPPER_FOLDER}.linear:linear"
        packs = {"weight": PACKING}
        return Kernel(
            "linear", provider, where, when, RANK_UNPROVED, packs, products, capture_safe=True, note=note, **options
        )

    return [
        kernel("gluon_fp8", NOT_RUN, FP8_ACTIVATIONS_128, **FP8_ACTIVATIONS),
        Kernel(
            "moe_experts", "gluon_fp8", f"{HOPPER_FOLDER}.experts:moe_experts",
            When((torch.bfloat16,), ("fp8_block",), features=FEATURES, needs=FP8_BLOCK_EXPERTS), RANK_UNPROVED,
            dict.fromkeys(("gate_up", "down"), PACKING), products, capture_safe=True,
            note=NOT_RUN, **FP8_ACTIVATIONS,
        ),
    ]  # fmt: skip


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    portable = [*triton_kernels(PAGED_NAMES, tiles), *matrix_kernels(products)]
    declared = [*composed_kernels(), *portable, *hopper_kernels(), *providers.kernels()]
    return rank_measured(declared, load_measured())
