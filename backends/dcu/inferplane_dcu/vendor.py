"""The vendor's functions that kernels call, and where each release keeps them.

Hygon moves functions between modules from release to release (`lightop.op`, then categories such as `lightop.norm`;
lmslim into lightop), so a function is a name and the modules that have had it, newest first. Whether it is here is a
feature, found out when the device is opened; the kernel gets the function itself when it is linked.

Sources: HYGON-AI/vllm-plugin-das (its calls, and its notes on lightop 0.6 and what moved there from lmslim), the DCU
fork's flash_attn_interface.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.plugin import Context, Feature, KernelError, is_installed, libraries_of, load_library
from inferplane_dcu import versions

CACHE_OPERATORS = "hcu-ops"
"""Feature: the operators `torch.ops.hcu_ops` of the vendor's vLLM plugin."""
_PLUGIN, _LIBRARY = "vllm_hcu", "hcu_ops*.so"


@dataclass(frozen=True)
class VendorFunction:
    """A function of the vendor's.

    Args:
        name: its name, the same in every release.
        modules: those that have had it, newest first.
    """

    name: str
    modules: tuple[str, ...]

    @property
    def feature(self) -> str:
        """The feature that says whether it is here: "lightop.silu_and_mul_opt"."""
        return f"{self.modules[0].partition('.')[0]}.{self.name}"

    def find(self) -> Callable[..., Any]:
        """The function, from the newest of its modules that is here.

        Raises:
            KernelError: none of them has it; says what each answered.
        """
        answers = []
        for module in self.modules:
            try:
                return getattr(importlib.import_module(module), self.name)
            except Exception as error:  # importing a closed wheel on the wrong machine may raise anything
                answers.append(f"{module}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
        raise KernelError(
            f"{self.name} of Hygon's {self.modules[0].partition('.')[0]} is not here.",
            there_is="; ".join(answers),
            remedy="install the DAS wheel of the release that torch is of (https://das.sourcefind.cn)",
        )


RMS_NORM = VendorFunction("rmsnorm_forward_autograd", ("lightop.norm", "lightop.op", "lightop"))
ADD_RMS_NORM = VendorFunction("fused_add_rms_norm", ("lightop.norm", "lightop.op", "lightop"))
SILU_MUL = VendorFunction("silu_and_mul_opt", ("lightop.activation", "lightop.op"))
ROPE = VendorFunction("rotary_embedding_fuse", ("lightop.op",))
NORM_ROPE = VendorFunction("rms_rotary_embedding_fuse", ("lightop.attention", "lightop.op", "lightop"))
QUANTIZE = VendorFunction("per_token_quant_int8", ("lightop.quant", "lmslim.layers.gemm.int8_utils"))
W8A8 = VendorFunction("hipblaslt_w8a8_gemm", ("lightop.gemm_ops", "lmslim.quant_ops", "lmslim.quantize.quant_ops"))
GATE = VendorFunction("moe_fused_gate", ("lightop.moe",))
EXPERTS_CONFIG = VendorFunction("get_moe_cuda_marlin_config_w16a16", ("lightop.moe",))
EXPERTS_ALIGN = VendorFunction("moe_align_block_size_out", ("lightop.moe",))
EXPERTS_PRODUCT = VendorFunction("moe_gemm_marlin_w16a16", ("lightop.moe",))
EXPERTS_ACT = VendorFunction("fuse_silu_and_mul", ("lightop.activation",))
EXPERTS_SUM = VendorFunction("moe_sum", ("lightop.moe",))
EXPERTS = (EXPERTS_CONFIG, EXPERTS_ALIGN, EXPERTS_PRODUCT, EXPERTS_ACT, EXPERTS_SUM)
"""Of lightop 0.6; before it the product took a mode instead of a configuration."""
INT8_EXPERTS_CONFIG = VendorFunction("get_moe_cuda_marlin_config", ("lightop.moe", "lightop"))
INT8_EXPERTS_PRODUCT = VendorFunction("moe_gemm_marlin_w8a8", ("lightop.moe", "lightop"))
INT8_EXPERTS = (INT8_EXPERTS_CONFIG, QUANTIZE, INT8_EXPERTS_PRODUCT, EXPERTS_ACT, EXPERTS_SUM)
"""The product takes a configuration here too; AITER's of this name takes a mode."""
FLASH = VendorFunction("flash_attn_varlen_func", ("flash_attn",))
FLASH_PAGED = VendorFunction("hg_flash_attn_varlen_func", ("flash_attn", "flash_attn.flash_attn_interface"))
FLASH_PROMPTS = VendorFunction("vllm_flash_attn_varlen_func", ("flash_attn", "flash_attn.flash_attn_interface"))
FLASH_TOKENS = VendorFunction("vllm_flash_attn_with_kvcache", ("flash_attn", "flash_attn.flash_attn_interface"))
MLA_PLAN = VendorFunction("get_mla_metadata", ("flash_mla", "flash_mla.flash_mla_interface"))
MLA = VendorFunction("flash_mla_with_kvcache", ("flash_mla", "flash_mla.flash_mla_interface"))
MLA_FP8_PLAN = VendorFunction("get_mla_decoding_metadata_dense_fp8", ("flash_mla", "flash_mla.flash_mla_interface"))
MLA_FP8 = VendorFunction("flash_mla_with_kvcache_quantization", ("flash_mla", "flash_mla.flash_mla_interface"))
"""Queries in 16 bits over latents in FP8; vllm-plugin-das calls what is behind it, fwd_kvcache_quantization_mla."""

FUNCTIONS = tuple(value for value in list(globals().values()) if isinstance(value, VendorFunction))


def find_once(*functions: VendorFunction) -> Callable[[Any, Context], Any]:
    """`Kernel.prepare` that looks functions up when the kernel is linked: one as itself, several as a tuple."""

    def prepare(op: Any, ctx: Context) -> Any:
        found = tuple(function.find() for function in functions)
        return found[0] if len(found) == 1 else found

    return prepare


def device() -> tuple[str, int]:
    """Name and number of compute units of the current DCU, by which lightop's tables of configurations go."""
    index = torch.cuda.current_device()
    return torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).multi_processor_count


def table_device() -> tuple[str, int]:
    """As `device`, with the name that the vendor's own callers look int8 products up by (LMSLIM_GPU_NAME)."""
    name, units = device()
    for module in ("lightop.envs", "lmslim.envs"):
        try:
            return str(importlib.import_module(module).LMSLIM_GPU_NAME), units
        except Exception:  # importing a closed wheel on the wrong machine may raise anything
            continue
    return name, units


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype, by which the same callers look them up."""
    return getattr(importlib.import_module("triton.language"), str(dtype).removeprefix("torch."))


def assume_features() -> dict[str, Feature]:
    """Every function and operator, as on a machine that has the vendor's current release."""
    return {
        **{f.feature: Feature(True, f"assumed: {f.modules[0]} has it") for f in FUNCTIONS},
        CACHE_OPERATORS: Feature(True, f"assumed: {_PLUGIN} is installed"),
    }


def find_features() -> dict[str, Feature]:
    """Which of them are here; their modules are imported, which may start the device."""
    return {**{f.feature: _look_for(f) for f in FUNCTIONS}, CACHE_OPERATORS: _load_operators()}


def _look_for(function: VendorFunction) -> Feature:
    packages = sorted({module.partition(".")[0] for module in function.modules})
    if not any(is_installed(package) for package in packages):
        return Feature(False, f"{' and '.join(packages)}: not installed; DAS has wheels")
    try:
        return Feature(True, f"found in {function.find().__module__}")
    except KernelError as error:
        return Feature(False, f"not found ({error.there_is})")


def _load_operators() -> Feature:
    """The shared library alone: importing the plugin would import vLLM."""
    libraries = libraries_of(_PLUGIN, _LIBRARY)
    if not libraries:
        return Feature(False, f"{_PLUGIN}, which has {_LIBRARY}, is not installed; DAS has wheels")
    return load_library(libraries[0]) or Feature(True, f"loaded from {libraries[0]}")


def triton(gfx: str) -> Feature:
    """Whether a Triton is here that compiles for a DCU: upstream's LLVM does not know Hygon's gfx names."""
    if not is_installed("triton"):
        return Feature(False, "Triton is not installed; DAS has wheels of Hygon's build")
    here = versions.read_installed()
    compilers = [f"{name} {here[name]}" for name in ("triton", "flagtree") if name in here]
    if not any(versions.dtk_of(name) or "+hcu" in name for name in compilers):
        what = " and ".join(compilers) or "triton (version unknown)"
        return Feature(False, f"{what} is not Hygon's build, which alone knows {gfx}")
    return Feature(True, ", ".join(compilers))
