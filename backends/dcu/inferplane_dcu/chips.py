"""Hygon's architectures: products, what each can do, and where that is known from."""

from __future__ import annotations

from inferplane.plugin import Feature, Features
from inferplane_dcu import vendor

_UNREAD = "no source that we read says so or denies it"
_FP8_ONLY = "the vendor's FP8 kernels are built for gfx938 alone (HYGON-AI/vllm-plugin-das)"
_FP8 = "the vendor's FP8 kernels are built for it (HYGON-AI/vllm-plugin-das)"
_DEPLOYED = "the vendor publishes deployments of this kind for this DCU (DAS cookbook)"
_NO_FP8 = Feature(False, _FP8_ONLY)

_PROVED = {"bf16": Feature(True, _DEPLOYED), "int8-dot": Feature(True, _DEPLOYED)}
_OPEN = {"bf16": Feature(None, _UNREAD), "int8-dot": Feature(None, _UNREAD)}

GFX: dict[str, tuple[str, dict[str, Feature]]] = {
    "gfx936": ("BW1000", {**_PROVED, "fp8": _NO_FP8}),
    "gfx928": ("K100_AI", {**_PROVED, "fp8": _NO_FP8}),
    "gfx938": ("BW1100", {**_PROVED, "fp8": Feature(True, _FP8)}),
    "gfx906": ("Z100", {**_OPEN, "fp8": _NO_FP8}),
    "gfx926": ("K100", {**_OPEN, "fp8": _NO_FP8}),
    "gfx946": ("gfx946", {}),
    "gfx92a": ("gfx92a", {}),
}
"""Hygon's gfx names: product and features. Some pairs of name and product were inferred from the vendor's code."""

SHARED_NAME = "gfx906"
"""Hygon's Z100 and AMD's MI50 both go by it."""

PAGED_PROMPTS = "paged-prompts"
"""Feature: flash_attn's paged form for many query tokens reads blocks of heads rightly."""
_WRONG_ON = "gfx928"

FP8_LATENTS = "fp8-latents"
"""Feature: FlashMLA's function for latents in FP8 beside queries in 16 bits is the one for this DCU."""
_FP8_QUERIES_ON = "gfx938"


def features_of(gfx: str) -> Features:
    """What an architecture can do, with all of the vendor's functions assumed to be installed; what is not known of the
    architecture is left out, which means unknown.
    """
    if gfx not in GFX:
        return Features({})
    reported = Feature(
        gfx != _WRONG_ON,
        "its results for several query tokens over such blocks were reported wrong on the K100_AI (gfx928) in 2026",
    )
    return Features(
        {
            "fp16": Feature(True, "every DCU computes in it"),
            **GFX[gfx][1],
            PAGED_PROMPTS: reported,
            FP8_LATENTS: Feature(
                gfx != _FP8_QUERIES_ON,
                "on gfx938 the vendor calls another one, whose queries are in FP8 too (HYGON-AI/vllm-plugin-das)",
            ),
            "triton": Feature(True, "assumed: Hygon's build of Triton is installed"),
            **vendor.assume_features(),
        }
    )


def features_here(gfx: str) -> Features:
    """The same with what of the vendor's software is found on this machine; its packages are imported."""
    return Features({**features_of(gfx), "triton": vendor.triton(gfx), **vendor.find_features()})
