"""Kernels for Intel GPUs: the operators of vllm-xpu-kernels, torch's own on packed weights, what Intel's archived
extension still serves, and for the rest what is composed from torch's operators on the GPU.

Source of the operators that are vLLM's own: vllm-project/vllm-xpu-kernels at 4543b580, csrc/layernorm.cpp,
pos_encoding_kernels.cpp, activation.cpp and cache.cpp; schemas as in its wheel 0.1.16.2.
"""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.kernels.fused.needs import FLOATS
from inferplane.kernels.fused.vllm_kernels import vllm_kernels
from inferplane.plugin import Kernel
from inferplane_xpu.intel.kernels import attention, fp8_cache, legacy, mla, moe, products
from inferplane_xpu.intel.kernels.when import OPERATORS
from inferplane_xpu.intel.kvcache import PAGED


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. torch.ops looks the vendor's operators up when they are called."""
    return [
        *vllm_kernels("vllm_xpu", FLOATS, OPERATORS, PAGED, rope_requires_key=False),
        *attention.KERNELS,
        *mla.KERNELS,
        *fp8_cache.KERNELS,
        *moe.KERNELS,
        *products.KERNELS,
        *legacy.KERNELS,
        *composed_kernels(),
    ]
