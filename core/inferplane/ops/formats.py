"""Weight formats: how a plain weight is quantized to canonical form, and how quantized activations are dequantized."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from inferplane.errors import UsageError
from inferplane.types import QTensor
from inferplane.types.qtensor import round_entries, scale_shape, scales

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

FORMATS: dict[str, tuple[torch.dtype, int, tuple[int, int]]] = {
    "fp8_block": (FP8, 8, (128, 128)),
    "fp8_row": (FP8, 8, (1, 0)),
    "int8_row": (torch.int8, 8, (1, 0)),
    "int8_group": (torch.int8, 8, (1, 128)),
    "int4_group": (torch.int8, 4, (1, 128)),
    "int4_group64": (torch.int8, 4, (1, 64)),
    "int4_group32": (torch.int8, 4, (1, 32)),
    "int4_row": (torch.int8, 4, (1, 0)),
    "mxfp4": (torch.int8, 8, (1, 32)),
    "mxfp8": (FP8, 8, (1, 32)),
    "nvfp4": (torch.int8, 8, (1, 16)),
    "int8_group32": (torch.int8, 8, (1, 32)),
    "int8_group16": (torch.int8, 8, (1, 16)),
    "int4_min32": (torch.int8, 4, (1, 32)),
    "int8_min16": (torch.int8, 8, (1, 16)),
}
"""Weight formats: dtype of the data, significant bits, rows and columns per scale (0 columns: the whole row).

"mxfp4" is e2m1 with a power of two per 32 columns. Its values are the integers `MXFP4_VALUES` times half that power, so
its canonical data are these integers: -12 to 12, which take 5 bits. "nvfp4" has such entries too, with scales of e4m3
per 16 columns times one factor; "mxfp8" is e4m3 with a power of two per 32 columns.

"int4_min32" and "int8_min16" have a minimum beside each scale (`QTensor.minimum`), which is added: their entries count
up from it, 0 to 15 and 0 to 127. GGUF's types are read as one of these and of the groups of 32 and 16 columns."""

MINIMUMS = {"int4_min32": 15, "int8_min16": 127}
"""Largest entries of the formats with minimums."""

MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of the floating-point format e2m1, by its lower three bits."""


GROUPED = ("int4_group32", "int8_group32", "int8_group16", "int4_min32", "int8_min16")
"""Formats of which parts may be joined: integers, each of whose groups is a group, or two, of another format."""


def join_formats(formats: Collection[str]) -> str | None:
    """The format that holds the values of parts in several formats exactly, of `GROUPED` or with groups of 128 columns;
    None: there is none."""
    if set(formats) == {"int4_group", "int8_group"}:
        return "int8_group"
    if not formats or not set(formats) <= set(GROUPED):
        return None
    if len(set(formats)) == 1:
        return next(iter(formats))
    if set(formats) & set(MINIMUMS):
        return "int8_min16"
    return "int8_group16" if "int8_group16" in formats else "int8_group32"


def dense_bits(format: str) -> int:
    """Bits of an entry of one of `FORMATS` where entries share bytes."""
    return 4 if format in ("mxfp4", "nvfp4") else FORMATS[format][1]


def count_bytes(shape: tuple[int, ...], format: str, *, dense: bool = False) -> int:
    """Bytes of a weight's entries, and of its scales and minimums in float32.

    Args:
        shape: `[..., N, K]`.
        format: one of `FORMATS`; of another one, entries of a byte are counted, without scales.
        dense: entries of fewer than 8 bits share bytes.
    """
    if format not in FORMATS:
        return math.prod(shape)
    rows, columns = FORMATS[format][2]
    scales = math.prod(scale_shape(shape, (rows, columns or shape[-1]))) * (2 if format in MINIMUMS else 1)
    return math.prod(shape) * (dense_bits(format) if dense else 8) // 8 + 4 * scales


def limit(dtype: torch.dtype, bits: int) -> float:
    """Largest magnitude of a format: 448 for FP8 e4m3, 127 for int8, 7 for int4."""
    return FP8_MAX if dtype is FP8 else float(2 ** (bits - 1) - 1)


def encode(weight: torch.Tensor, format: str) -> QTensor:
    """Quantize a plain weight by rounding to nearest, with a scale of `amax / limit` per block.

    Args:
        weight: `[..., N, K]`.
        format: one of `FORMATS`.

    Returns:
        A QTensor, symmetric but in the formats with minimums. A block of zeros gets scale 1, in NVFP4 half of the
        factor, which avoids a division by zero.

    Raises:
        UsageError: unknown format.

    Source: block scales as in the DeepSeek-V3 report, section 3.3.2 (128 x 128 blocks, e4m3); rows and groups as in
    common weight-only schemes.
    """
    if format not in FORMATS:
        raise UsageError(f"Unknown weight format {format!r}.", there_is=", ".join(sorted(FORMATS)))
    if format in _ENCODERS:
        return _ENCODERS[format](weight)
    if format in MINIMUMS:
        return _encode_from_minimum(weight, format)
    dtype, bits, (rows, columns) = FORMATS[format]
    block = (rows, columns or weight.shape[-1])
    w = weight.float()
    counts = scale_shape(tuple(w.shape), block)
    pad = (0, counts[-1] * block[1] - w.shape[-1], 0, counts[-2] * block[0] - w.shape[-2])
    tiles = torch.nn.functional.pad(w, pad).unflatten(-1, (counts[-1], block[1])).unflatten(-3, (counts[-2], block[0]))
    amax = tiles.abs().amax((-3, -1))
    top = limit(dtype, bits)
    scale = scales(amax, top)
    scaled = w / QTensor(torch.empty_like(w), scale, block=block).expand_scale()
    return QTensor(round_entries(scaled, dtype, top), scale, block=block, bits=bits)


def _encode_mxfp4(weight: torch.Tensor) -> QTensor:
    """Quantize to e2m1 with a power of two per 32 columns.

    The power makes the block's largest magnitude 4 to 8 times it, of which those beyond 6 saturate. A block with NaN or
    an infinity is NaN as a whole, by its scale: entries have no such values.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
    """
    w = weight.float().contiguous()
    amax = _group_maxima(w, "mxfp4")
    return _round_to_e2m1(w, find_mxfp4_scales(amax), "mxfp4")


def _encode_mxfp8(weight: torch.Tensor) -> QTensor:
    """Quantize to e4m3 with a power of two per 32 columns, as `_encode_mxfp4`: the largest magnitude is 256 to 512."""
    w = weight.float().contiguous()
    dtype, bits, block = FORMATS["mxfp8"]
    amax = _group_maxima(w, "mxfp8")
    scale = _powers(amax, 8).masked_fill(amax == 0, 1.0)
    scaled = w / QTensor(torch.empty_like(w), scale, block=block).expand_scale()
    return QTensor(round_entries(scaled, dtype, FP8_MAX), scale, block=block, bits=bits)


def find_nvfp4_factor(amax: torch.Tensor) -> torch.Tensor:
    """The factor of all scales of a matrix in NVFP4, by the largest magnitudes in it, of any shape.

    It is a power of two, the smallest with which no scale exceeds 448, so that a scale of e4m3 times it is exact in
    float32, and in float16 in its range.

    Source: ModelOpt's NVFP4, whose factor is the largest magnitude / (6 * 448), no power of two.
    """
    least = amax / (MXFP4_VALUES[-1] / 2 * FP8_MAX)
    log = torch.ceil(torch.log2(torch.where(least == 0, torch.ones_like(least), least)))
    return torch.ldexp(torch.ones_like(log), log.clamp(-110, 120))


def _encode_nvfp4(weight: torch.Tensor) -> QTensor:
    """Quantize to e2m1 with a scale of e4m3 per 16 columns and one factor of a matrix (`find_nvfp4_factor`)."""
    w = weight.float().contiguous()
    amax = _group_maxima(w, "nvfp4")
    finite = w.abs().nan_to_num(0.0, posinf=0.0)
    return encode_nvfp4_with(w, find_nvfp4_factor(finite.amax((-2, -1), keepdim=True)), amax)


def encode_nvfp4_with(w: torch.Tensor, factor: torch.Tensor, amax: torch.Tensor | None = None) -> QTensor:
    """Quantize to e2m1 with a scale of e4m3 per 16 columns.

    Args:
        w: float32 `[..., N, K]`.
        factor: of all scales; fits `[..., N, groups]`.
        amax: largest magnitudes of groups, `[..., N, groups]`; None: they are found.
    """
    amax = _group_maxima(w, "nvfp4") if amax is None else amax
    return _round_to_e2m1(w, find_nvfp4_scales(amax, factor), "nvfp4")


def find_nvfp4_scales(amax: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Scales of canonical entries in NVFP4, which are numbers of e4m3 times half of `factor`, for the largest
    magnitudes of groups; NaN for a group with NaN or an infinity."""
    scale = (amax / (MXFP4_VALUES[-1] / 2) / factor).clamp(2.0**-9, FP8_MAX).to(FP8).float() * factor / 2
    scale = torch.where(amax == 0, factor / 2, scale)  # which float16 holds where it holds others
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def _encode_from_minimum(weight: torch.Tensor, format: str) -> QTensor:
    """Quantize to equal steps from the smallest entry of a group of columns, or from zero, to the largest.

    Scales and minimums are rounded to float16 where they fit, as checkpoints have them. A group with NaN or an infinity
    is NaN as a whole.

    Source: GGUF's type Q4_1.
    """
    dtype, bits, block = FORMATS[format]
    w, top = weight.float().contiguous(), MINIMUMS[format]
    groups = scale_shape(tuple(w.shape), block)[-1]
    tiles = torch.nn.functional.pad(w, (0, groups * block[1] - w.shape[-1])).unflatten(-1, (groups, block[1]))
    least, most = tiles.amin(-1).clamp(max=0.0), tiles.amax(-1).clamp(min=0.0)
    scale, minimum = _in_half(scales(most - least, top)), _in_half(least)
    entries = ((tiles - minimum[..., None]) / scale[..., None]).nan_to_num(0.0).round().clamp(0, top)
    finite = tiles.isfinite().all(-1)
    scale, minimum = scale.masked_fill(~finite, torch.nan), minimum.masked_fill(~finite, torch.nan)
    return QTensor(entries.flatten(-2)[..., : w.shape[-1]].to(dtype), scale, block=block, bits=bits, minimum=minimum)


def _in_half(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to float16, but those that it does not hold."""
    half = numbers.half().float()
    return torch.where(half.isfinite() & ((half != 0) | (numbers == 0)), half, numbers)


_ENCODERS = {"mxfp4": _encode_mxfp4, "mxfp8": _encode_mxfp8, "nvfp4": _encode_nvfp4}


def _group_maxima(w: torch.Tensor, format: str) -> torch.Tensor:
    """Largest magnitudes `[..., N, groups]` of the groups of columns that share a scale."""
    block = FORMATS[format][2]
    groups = scale_shape(tuple(w.shape), block)[-1]
    tiles = torch.nn.functional.pad(w, (0, groups * block[1] - w.shape[-1])).unflatten(-1, (groups, block[1]))
    return tiles.abs().amax(-1)


def find_mxfp4_scales(amax: torch.Tensor) -> torch.Tensor:
    """Scales of canonical entries in MXFP4 for the largest magnitudes of groups, as `encode` has them."""
    return (_powers(amax, 2) / 2).masked_fill(amax == 0, 1.0)


def _powers(amax: torch.Tensor, exponent: int) -> torch.Tensor:
    """The powers of two of which `amax` is 2^exponent to 2^(exponent + 1) times one; NaN for NaN and infinity."""
    log = torch.floor(torch.log2(torch.where(amax == 0, torch.ones_like(amax), amax))).clamp(-125, 127) - exponent
    scale = torch.ldexp(torch.ones_like(log), log)
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def _round_to_e2m1(w: torch.Tensor, scale: torch.Tensor, format: str) -> QTensor:
    """Entries rounded to the nearest value of `MXFP4_VALUES` times `scale`."""
    dtype, bits, block = FORMATS[format]
    data = round_to_e2m1(w / QTensor(torch.empty_like(w), scale, block=block).expand_scale())
    return QTensor(data.to(dtype), scale, block=block, bits=bits)


def round_to_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest of `MXFP4_VALUES` and their negatives to float32 numbers of any shape; 0 for NaN."""
    grid = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=scaled.device)
    middles = (grid[1:] + grid[:-1]) / 2
    return grid[torch.bucketize(scaled.abs().nan_to_num(0.0), middles)] * scaled.sign().nan_to_num(0.0)


def dequantize_rows(data: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Undo `Quantize`: float32 `[T, K]` from data `[T, K]` and scale `[T, groups]`; `group` 0 is the whole row.

    Raises:
        UsageError: `scale` has another number of groups.
    """
    want = scale_shape(tuple(data.shape), (1, group or data.shape[-1]))
    if tuple(scale.shape) != want:
        raise UsageError(
            f"Scales of shape {tuple(scale.shape)} for groups of {group or 'all'} columns; required: {want}."
        )
    wide = scale.repeat_interleave(group or data.shape[-1], -1)[..., : data.shape[-1]]
    return data.float() * wide
