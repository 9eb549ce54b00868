"""Quantized checkpoints: their formats, and the readers that turn them into `QTensor`s."""

from inferplane.quant.choose import Chosen, choose_formats, make_reads, schemes_instead
from inferplane.quant.column_order import settle_order
from inferplane.quant.formats import READERS, read_fp8_block, read_fp8_row, read_fp8_static, read_integers
from inferplane.quant.online import (
    SCHEMES,
    explain_no_savings,
    find_scheme,
    formats_read_by_row,
    latent_formats,
    latent_request,
    quantize_on_load,
    takes_as_stored,
)
from inferplane.quant.plugged import open_format
from inferplane.quant.requantize import count_requantized, explain_requantized, requantize_on_load
from inferplane.quant.stored import QuantFormats, format_of, read_quant_config
from inferplane.quant.unpack import IntegerPacking, UnpackedSource

__all__ = [
    "READERS",
    "SCHEMES",
    "Chosen",
    "IntegerPacking",
    "QuantFormats",
    "UnpackedSource",
    "choose_formats",
    "count_requantized",
    "explain_no_savings",
    "explain_requantized",
    "find_scheme",
    "format_of",
    "formats_read_by_row",
    "latent_formats",
    "latent_request",
    "make_reads",
    "open_format",
    "quantize_on_load",
    "read_fp8_block",
    "read_fp8_row",
    "read_fp8_static",
    "read_integers",
    "read_quant_config",
    "requantize_on_load",
    "schemes_instead",
    "settle_order",
    "takes_as_stored",
]
