"""Quantized checkpoints: their formats, and how they become `QTensor`s."""

from inferplane.quant.formats import READERS, format_of, read_fp8_block

__all__ = ["READERS", "format_of", "read_fp8_block"]
