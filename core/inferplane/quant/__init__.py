"""Quantized checkpoints: their formats, and how they become `QTensor`s."""

from inferplane.quant.formats import READERS, read_fp8_block, read_fp8_row, read_fp8_static, read_integers
from inferplane.quant.online import (
    SCHEMES,
    explain_no_savings,
    formats_read_by_row,
    latent_formats,
    latent_request,
    online,
)
from inferplane.quant.stored import QuantFormats, format_of, stored
from inferplane.quant.unpack import Packed, UnpackedSource

__all__ = [
    "READERS",
    "SCHEMES",
    "Packed",
    "QuantFormats",
    "UnpackedSource",
    "format_of",
    "formats_read_by_row",
    "latent_formats",
    "latent_request",
    "online",
    "read_fp8_block",
    "read_fp8_row",
    "read_fp8_static",
    "read_integers",
    "stored",
    "explain_no_savings",
]
