"""Intel GPUs by name, and what each can do."""

from __future__ import annotations

import re
from typing import Any

import torch

from inferplane.plugin import Feature, Features

xpu = torch.ops._xpu_C

_XMX = "every Xe GPU with XMX engines multiplies matrices in it"
_FP8 = "torch does not report it; oneDNN's products in FP8 do not ask for it"
_ASSUMED = "assumed: vllm-xpu-kernels is installed"
_COMPILED = "vllm-xpu-kernels' attention and grouped products were compiled for Xe2, Xe3 and Ponte Vecchio"
_TORCH = "assumed: this torch has it for XPU"

_NAMES: tuple[tuple[str, str], ...] = (
    (r"Data Center GPU Max", "pvc"),
    (r"Arc.*\b1[34]0V\b", "lnl"),
    (r"Arc.*\bB\d{2,3}\b", "bmg"),
    (r"Arc.*\bA\d{2,3}M?\b|Data Center GPU Flex", "dg2"),
)
"""Pattern of a device's name -> architecture. Source: names printed by torch.xpu.get_device_name in public reports."""

MATRIX_ARCHS = ("bmg", "lnl", "pvc")
"""Source: is_xe2_arch in vllm-project/vllm-xpu-kernels at 4543b580, csrc/utils.h."""
ARCHS = ("bmg", "lnl", "pvc", "dg2")

PRODUCTS = {"int4-product": "_weight_int4pack_mm_with_scales_and_zeros", "int8-product": "_weight_int8pack_mm"}
"""Feature -> torch's own operator on packed weights."""


def arch_of(name: str) -> str:
    """The architecture of a device by its name; "xe" when the name is of none that is known here."""
    return next((arch for pattern, arch in _NAMES if re.search(pattern, name)), "xe")


def assume_features(arch: str) -> Features:
    """Of an architecture by public specification, with everything installed."""
    return Features(
        {
            **{name: Feature(True, _XMX) for name in ("fp16", "bf16", "int8-dot")},
            "fp8": Feature(None, _FP8),
            "vllm-xpu-kernels": Feature(True, _ASSUMED),
            "xe2-kernels": Feature(arch in MATRIX_ARCHS, _COMPILED),
            **{name: Feature(True, _TORCH) for name in PRODUCTS},
            "ipex": Feature(False, "intel_extension_for_pytorch is archived: it is not assumed"),
        }
    )


def features_of(properties: Any) -> Features:
    """What torch reports of a device; what an older torch does not report stays unknown."""
    return Features(
        {
            "fp16": _read_feature(properties, "has_fp16"),
            "bf16": _read_feature(properties, "has_bfloat16_conversions"),
            "int8-dot": _read_feature(properties, "has_subgroup_matrix_multiply_accumulate"),
            "fp8": Feature(None, _FP8),
            **{name: _of_torch(operator) for name, operator in PRODUCTS.items()},
        }
    )


def matrix_kernels(index: int) -> Feature:
    """Whether the loaded extension's attention and grouped products run on a GPU, by its own word."""
    return Feature(bool(xpu.is_xe2_arch(index) or xpu.is_xe3_arch(index)), _COMPILED)


def _read_feature(properties: Any, attribute: str) -> Feature:
    value = getattr(properties, attribute, None)
    return Feature(None if value is None else bool(value), f"torch reports {attribute}={value}")


def _of_torch(operator: str) -> Feature:
    there = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "XPU")
    return Feature(there, f"torch {torch.__version__} has {'' if there else 'no '}{operator} for XPU")
