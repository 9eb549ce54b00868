"""Huawei's NPUs: a series of Ascend, on torch-npu's operators; on the 310P on ATB's besides."""

from __future__ import annotations

from collections.abc import Iterator

from tests.vendors.configs import COMPOSED_ATTENTION, LATENT, OWN_ATTENTION
from tests.vendors.npu import chip
from tests.vendors.profile import DRAFTS, Profile

NO_ATB = ("mistral_window", "gemma3", *LATENT)
"""Windows and latents, for which ATB has nothing on the 310P."""
CHOSEN_LATENTS = ("deepseek_v32", "glm_moe_dsa")
"""Families with latent attention to tokens that an indexer chose."""
OWN = {"910b": ("gpt_oss", *CHOSEN_LATENTS), "950": CHOSEN_LATENTS}.get(chip.ARCH, ())
"""Families whose attention core composes elsewhere: on the 910b its own takes sinks, there and on the 950 chosen
latents."""
NO_TORCH_NPU = ("cohere", "cohere2")
"""Layer norms and pairs of neighbours, for which torch-npu has nothing on the 310P."""


class Npu(Profile):
    """Its library is there, so its contract is with that: test_contract.py."""

    device = "npu"
    sources = "backends/npu/inferplane_npu"
    dtype = chip.DTYPE
    composed_attention = tuple(family for family in COMPOSED_ATTENTION if family not in OWN)
    engine_families = (*OWN_ATTENTION, *OWN)
    speculative = {"plain": None, "drafts": DRAFTS}
    quantized = {
        "910b": {
            "weight_only_int8": "torch_npu:linear_w8a16",
            "weight_only_int4": "torch_npu:linear_w4a16",
            "a8w8": "torch_npu:linear_w8a8",
        },
        "950": {"a8w8_fp8": "torch_npu:linear_fp8", "a8w8": "torch_npu:linear_w8a8"},
        "310p": {"weight_only_int8": "torch_npu:linear_w8a16"},
    }[chip.ARCH]
    dense_only = ("weight_only_int8",) if chip.ARCH == "310p" else ()

    def models(self) -> Iterator[tuple[str, str, str]]:
        if chip.ARCH == "950":  # the 910b's kernels, but for FP8, convolutions, recurrences of prompts, and indexers
            return ((family, "plain", "ragged") for family in ("lfm2", "qwen3_5", "deepseek_v32", "deepseek_v4"))
        return super().models()

    def attention(self, family: str) -> tuple[str, ...]:
        return ("torch_npu", "atb")

    def layouts(self, family: str) -> set[str]:
        if family in CHOSEN_LATENTS:
            return {"npu_latent_nd_128", "npu_index_nd_128"}
        plain = "npu_nz_128" if chip.ARCH == "310p" else "npu_nd_128"
        return {"npu_latent_nd_128" if family in LATENT else plain}

    def check_kernels(self, family: str, chosen: list[tuple[str, str]]) -> None:
        expected = {"torch_npu", "torch"}
        if chip.ARCH == "310p":
            expected |= {"torch_sdpa"} if family in NO_ATB else set()  # a loop over sequences
            expected |= {"atb"} if family not in LATENT else set()
            expected -= {"torch_npu"} if family in NO_TORCH_NPU else set()
        assert {kernel.partition(":")[0] for _, kernel in chosen} - {"decomposition"} == expected


PROFILE = Npu("npu")
