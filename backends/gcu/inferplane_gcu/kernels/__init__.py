"""Kernels for Enflame GCUs: vllm-gcu's operators, and torch's own on the GCU for the rest.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, csrc/torch_bindings.cpp.
"""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.kernels.fused.needs import HALF
from inferplane.kernels.fused.vllm_kernels import vllm_kernels
from inferplane.plugin import Kernel
from inferplane_gcu.kernels import attention, attention_int8, int4, mla, moe, products
from inferplane_gcu.kernels.when import OPERATORS
from inferplane_gcu.kvcache import PAGED


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. torch.ops looks the vendor's operators up when they are called."""
    shared = vllm_kernels("vllm_gcu", HALF, OPERATORS, PAGED, rope_requires_key=True)
    own = (*products.KERNELS, *int4.KERNELS, *attention.KERNELS, *attention_int8.KERNELS, *mla.KERNELS, *moe.KERNELS)
    return [*shared, *own, *composed_kernels()]
