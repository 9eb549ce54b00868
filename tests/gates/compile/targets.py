"""Architectures that upstream Triton compiles for, and the tile sizes they are given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inferplane.kernels.triton import Launch, Product, Products, Tiles
from inferplane_cuda.kernels import AMPERE, AMPERE_PRODUCTS, BLACKWELL_PRODUCTS, HOPPER, HOPPER_PRODUCTS


@dataclass(frozen=True)
class Target:
    """An architecture.

    Args:
        triton: backend, architecture and warp size, as Triton's `GPUTarget` wants them.
        tiles: tile sizes of the portable kernels.
        shared_bytes: shared memory that a program may have.
        registers: most registers a thread may have.
        products: tile sizes of matrix products.
    """

    triton: tuple[str, int | str, int]
    tiles: Tiles
    shared_bytes: int
    registers: int
    products: Products = AMPERE_PRODUCTS

    def takes(self, specimen: str) -> bool:
        """Whether a specimen is compiled for it: those of Hopper's own instructions for nothing else, those that
        multiply FP8 numbers for NVIDIA's architectures that do, launches ahead for those that have them, sparse
        attention over FP8 for two.
        """
        if specimen.endswith("_ahead"):
            return self.triton[0] == "cuda" and int(self.triton[1]) >= 90
        if "_fp8_fp8" in specimen or "_int8_int8" in specimen:
            return self.triton[0] == "cuda"
        if specimen in ("index_select_fp8", "sparse_mla_fp8"):
            return self.triton[1] in (80, 90)
        if specimen.endswith("_8bit") or specimen.startswith(("experts_fp8", "product_coded", "product_fp8_int4")):
            return self.triton[1] in (90, 100)
        return not specimen.startswith("hopper_") or self.triton[1] == 90


AMD = Tiles(
    prefill=Launch(64, 32, 4, 1), mla=Launch(16, 16, 4, 1), decode=Launch(16, 64, 4, 1), sparse=Launch(16, 16, 4, 1),
    index=Launch(16, 64, 4, 1),
)  # fmt: skip
"""Nobody's own yet: what fits 64 KiB of shared memory. A gfx90a compile stands in for the DCUs that upstream lacks."""
AMD_PRODUCTS = Products(Product(16, 32, 4, 2), Product(64, 64, 4, 1), Product(64, 64, 4, 1), Product(64, 64, 8, 1), 104)
TARGETS = {
    "sm_80": Target(("cuda", 80, 32), AMPERE, 101376, 255),
    "sm_90": Target(("cuda", 90, 32), HOPPER, 232448, 255, replace(HOPPER_PRODUCTS, fp8=True)),
    "sm_100": Target(("cuda", 100, 32), HOPPER, 232448, 255, replace(BLACKWELL_PRODUCTS, fp8=True)),
    "gfx90a": Target(("hip", "gfx90a", 64), AMD, 65536, 512, AMD_PRODUCTS),
    "gfx942": Target(("hip", "gfx942", 64), AMD, 65536, 512, AMD_PRODUCTS),
    "gfx950": Target(("hip", "gfx950", 64), AMD, 163840, 512, AMD_PRODUCTS),
}
