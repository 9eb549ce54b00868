"""Where the vendor's kernels rank, which features they need, and which attention kernels were compiled."""

from __future__ import annotations

RANK_TORCH_PACKED = 60
"""torch's own operators on packed weights: behind the extension's, which do the same with more kinds of zero points."""
RANK_LEGACY = 55
"""Operators of an extension that its maker has archived."""

OPERATORS = ("vllm-xpu-kernels",)
"""Features: the operators of vllm-xpu-kernels."""
MATRIX = (*OPERATORS, "xe2-kernels")
"""The same on a GPU for which its attention and its grouped products were compiled."""

PREFILL_HEADS, PREFILL_WINDOW_HEADS = (64, 96, 128, 192, 256), (64, 96, 128, 256)
DECODE_HEADS = {8: (64, 96, 128, 192, 256), 16: (64, 128, 256)}
DECODE_WINDOW_HEADS = {8: (64, 96, 128, 256), 16: (128,)}
"""Head sizes for which attention over blocks of 64 tokens was compiled into vllm-xpu-kernels 0.1.16.2, without and with
a window; for single tokens by the kernel's tile of query heads a KV head. Other calls raise "not compiled".

Source: symbols of libattn_kernels_xe_2.so in that wheel, policy_dispatch_impl and decode_policy_dispatch_impl with
their template arguments. The kernels take each size up to the next of these; we take none between them.
"""
SINK_HEADS, SINK_DECODE_HEADS, SINK_DECODE_WINDOW_HEADS = (64, 128), (64, 128), (64,)
"""The same with sinks: for many query tokens, and for single ones with at most 8 query heads a KV head."""
LATENT_HEADS = 8
"""Query heads that one sequence of latents may bring: the only tile compiled for entries of 512 + 64."""


def is_prefill_compiled(dim: int, window: int | None, *, sinks: bool = False) -> bool:
    """Whether the kernel for many query tokens exists."""
    if sinks:
        return dim in SINK_HEADS
    return dim in (PREFILL_HEADS if window is None else PREFILL_WINDOW_HEADS)


def is_decode_compiled(dim: int, group: int, window: int | None, *, sinks: bool = False) -> bool:
    """Whether the kernel for single tokens exists, for `group` query heads a KV head."""
    if sinks:
        return group <= 8 and dim in (SINK_DECODE_HEADS if window is None else SINK_DECODE_WINDOW_HEADS)
    return dim in (DECODE_HEADS if window is None else DECODE_WINDOW_HEADS)[8 if group <= 8 else 16]
