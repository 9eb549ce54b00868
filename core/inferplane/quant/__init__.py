"""Quantized checkpoints: their formats, and how they become `QTensor`s."""

from inferplane.quant.formats import READERS, format_of, read_fp8_block
from inferplane.quant.online import SCHEMES, online, unsaved

__all__ = ["READERS", "SCHEMES", "format_of", "online", "read_fp8_block", "unsaved"]
