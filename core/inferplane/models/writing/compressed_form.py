"""Quantized weights as compressed-tensors stores them, or as DeepSeek's FP8 checkpoints do, and what their config says.

| format | tensors of a module | group of compressed-tensors |
|---|---|---|
| int8_row | weight int8 `[N, K]`, weight_scale `[N, 1]` | int-quantized |
| int8_group | weight_packed int32 `[N, K / 4]`, weight_shape, weight_scale `[N, K / 128]` | pack-quantized |
| int4_row, int4_group, int4_group64, int4_group32 | weight_packed int32 `[N, K / 8]`, likewise | pack-quantized |
| mxfp4 | weight_packed uint8 `[N, K / 2]`, weight_scale uint8 `[N, K / 32]` | mxfp4-pack-quantized |
| nvfp4 | weight_packed, weight_scale e4m3 `[N, K / 16]`, weight_global_scale float32 `[1]` | nvfp4-pack-quantized |
| fp8_row | weight e4m3 `[N, K]`, weight_scale float32 `[N, 1]` | float-quantized |
| fp8_block | weight, weight_scale float32 `[N / 128, K / 128]` | float-quantized |

Integers of 4 bits that are multiplied by activations in int8 are stored one a byte, as int8_row is and with the scales
of their format: so compressed-tensors writes them, and vLLM reads them. Beside activations in int4 they are packed.

A checkpoint whose quantized weights are all FP8 in blocks has DeepSeek's form: `weight_scale_inv` for the scales, and
`quant_method` "fp8". Scales of integers are float16 where that holds them all, else float32.

Source: compressed-tensors' compressors of these names; DeepSeek-V3's README_WEIGHTS.md.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from inferplane.models.writing.safetensors_writer import PlannedTensor
from inferplane.ops.formats import FORMATS, FP8_MAX, MXFP4_VALUES, find_nvfp4_factor, round_to_e2m1
from inferplane.quant.mxfp4 import BIAS, NOT_A_NUMBER
from inferplane.quant.online import ROWS
from inferplane.types import PLAIN, ActivationQuant, QTensor
from inferplane.types.qtensor import scale_shape

WORD_BITS = 32
FORMS = {
    "int8_row": "int-quantized",
    "int8_group": "pack-quantized",
    "int4_row": "pack-quantized",
    "int4_group": "pack-quantized",
    "int4_group64": "pack-quantized",
    "int4_group32": "pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "fp8_row": "float-quantized",
    "fp8_block": "float-quantized",
}
"""Formats that can be stated, and compressed-tensors' names for their form."""
ROW_FORMATS = {"int8_group": "int8_row", "int4_group": "int4_group64", "int4_group64": "int4_group32"}
ROW_FORMATS |= {"mxfp4": "nvfp4"}
"""What is taken for a weight whose columns are not whole groups, which compressed-tensors does not read."""
WEIGHT = ".weight"
E2M1 = ("mxfp4", "nvfp4")
"""Formats whose entries are floating-point numbers of 4 bits."""
SIGN_BIT = 8
"""In an entry's four bits."""

GROUP_SIZES = (32, 64, 128)
"""Columns that may share a scale of integers of 4 bits."""
GROUPED = dict(zip(GROUP_SIZES, ("int4_group32", "int4_group64", "int4_group")))


def regroup(format: str, group: int | None) -> str:
    """The format with groups of another size.

    Args:
        format: one of `FORMS`; others than groups of integers of 4 bits stay.
        group: one of `GROUP_SIZES`, or None for the format's own.
    """
    return format if group is None or format not in GROUPED.values() else GROUPED[group]


def find_storable(format: str, columns: int) -> str:
    """The format in which a weight of so many columns can be stored: the given one if its groups are whole, else the
    nearest that is, else "plain".

    Args:
        format: one of `FORMS`.
        columns: of the weight.
    """
    found = format
    while found in FORMS:
        group = FORMATS[found][2][1]
        if found == "fp8_block" or not group or columns % group == 0:
            return found
        found = ROW_FORMATS.get(found, PLAIN)
    return PLAIN


Quants = Mapping[str, ActivationQuant]
"""Format of weights -> quantization of the activations that they are multiplied by."""


def find_form(format: str, quants: Quants) -> str:
    """compressed-tensors' name for the form in which weights of a format, one of `FORMS`, are stored: its own reader
    takes packed integers where activations stay as they are alone."""
    quant = quants.get(format)
    is_wide = quant is not None and quant.format in ("int8", "int4") and FORMS[format] == "pack-quantized"
    return "int-quantized" if is_wide else FORMS[format]


def plan_tensors(
    name: str, format: str, shape: tuple[int, ...], quants: Quants, *, deepseek: bool
) -> Iterator[PlannedTensor]:
    """The tensors of a weight that `split` will give.

    Args:
        name: of the weight.
        format: one of `FORMS`.
        shape: `[N, K]`.
        quants: of activations.
        deepseek: in DeepSeek's form.
    """
    n, k = shape
    _, bits, (rows, columns) = FORMATS[format]
    module, scales = name.removesuffix(WEIGHT), scale_shape(shape, (rows, columns or k))
    if format in E2M1:
        of_scales = torch.uint8 if format == "mxfp4" else torch.float8_e4m3fn
        yield PlannedTensor(f"{module}.weight_packed", (n, k // 2), n * (k // 2), torch.uint8)
        yield PlannedTensor(f"{name}_scale", scales, math.prod(scales), of_scales)
        if format == "nvfp4":
            yield PlannedTensor(f"{module}.weight_global_scale", (1,), 4)
        return
    if find_form(format, quants) == "pack-quantized":
        words = (n, -(-k * bits // WORD_BITS))
        yield PlannedTensor(f"{module}.weight_packed", words, 4 * math.prod(words), torch.int32)
        yield PlannedTensor(f"{module}.weight_shape", (2,), 16)
    else:
        yield PlannedTensor(name, shape, math.prod(shape))
    yield PlannedTensor(f"{name}_scale{'_inv' if deepseek else ''}", scales, 4 * math.prod(scales))


def split(
    name: str, q: QTensor, format: str, quants: Quants, *, deepseek: bool, factor: torch.Tensor | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a quantized weight, by name.

    Args:
        name: of the weight.
        q: `[N, K]`, symmetric.
        format: one of `FORMS`.
        quants: of activations.
        deepseek: in DeepSeek's form.
        factor: of the scales of NVFP4, a power of two; None: the weight's own.
    """
    assert q.zero is None and q.minimum is None, format
    module = name.removesuffix(WEIGHT)
    if format in E2M1:
        yield from _split_e2m1(name, q, format, factor)
        return
    if find_form(format, quants) == "pack-quantized":
        yield f"{module}.weight_packed", pack_words(q.data, FORMATS[format][1])
        yield f"{module}.weight_shape", torch.tensor(q.shape)
    else:
        yield name, q.data
    half = q.scale.half()
    is_exact = q.data.dtype is torch.int8 and torch.equal(half.float(), q.scale)
    yield f"{name}_scale{'_inv' if deepseek else ''}", half if is_exact else q.scale


def _split_e2m1(name: str, q: QTensor, format: str, factor: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a weight in MXFP4 or NVFP4. The canonical entries are twice the values, with half the scales."""
    module = name.removesuffix(WEIGHT)
    if format == "mxfp4":
        exponents = torch.frexp(q.scale).exponent + BIAS
        yield f"{module}.weight_packed", pack_pairs(q.data)
        yield f"{name}_scale", exponents.masked_fill(~q.scale.isfinite(), NOT_A_NUMBER).to(torch.uint8)
        return
    factor = find_nvfp4_factor(amax_of_scales(q)) if factor is None else factor
    q = fit_to_factor(q, factor)
    yield f"{module}.weight_packed", pack_pairs(q.data)
    yield f"{name}_scale", (q.scale * 2 / factor).to(torch.float8_e4m3fn)
    yield f"{module}.weight_global_scale", 1 / factor.reshape(1)


def amax_of_scales(q: QTensor) -> torch.Tensor:
    """The largest magnitude that the scales of a weight in NVFP4 reach, of shape `[]`."""
    finite = q.scale.nan_to_num(0.0)
    return finite.amax() * MXFP4_VALUES[-1] if finite.numel() else torch.ones(())


def fit_to_factor(q: QTensor, factor: torch.Tensor) -> QTensor:
    """A weight in NVFP4 whose scales are numbers of e4m3 times a factor.

    Groups whose scales are no such products are rounded anew, with the nearest ones: those of checkpoints with another
    factor, and those far below the largest of weights that share it. Others stay as they are.

    Args:
        q: `[N, K]`.
        factor: a power of two.
    """
    fitting = (q.scale * 2 / factor).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn).float() * factor / 2
    other = (fitting != q.scale) & ~q.scale.isnan()
    rows = other.any(1).nonzero().flatten()
    if not len(rows):
        return q
    data, scale = q.data.clone(), torch.where(other, fitting, q.scale)
    for some in rows.split(ROWS):
        part = replace(q, data=q.data[some], scale=q.scale[some])
        anew = replace(part, scale=scale[some])
        entries = round_to_e2m1(part.dequantize() / anew.expand_scale()).to(data.dtype)
        changed = other[some].repeat_interleave(q.block[1], 1)[:, : q.shape[1]]
        data[some] = torch.where(changed, entries, part.data)
    return replace(q, data=data, scale=scale)


def pack_pairs(data: torch.Tensor) -> torch.Tensor:
    """Entries of e2m1, two a byte, the first one in the lower bits.

    Args:
        data: int8 `[N, K]`, twice the values: `MXFP4_VALUES` and their negatives. K is even.

    Returns:
        uint8 `[N, K / 2]`.
    """
    of_entry = torch.zeros(2 * MXFP4_VALUES[-1] + 1, dtype=torch.uint8)
    for nibble, value in enumerate(MXFP4_VALUES):
        of_entry[MXFP4_VALUES[-1] + value] = nibble
        if value:
            of_entry[MXFP4_VALUES[-1] - value] = nibble | SIGN_BIT
    nibbles = of_entry[(data + MXFP4_VALUES[-1]).int()]
    low, high = nibbles.unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


def pack_words(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers in words of 32 bits, the first ones in the lowest bits.

    Args:
        data: int8 `[N, K]`; the middle of the range is added, so that entries count from 0.
        bits: 4 or 8.

    Returns:
        int32 `[N, ceil(K * bits / 32)]`.
    """
    entries = data.view(torch.uint8) ^ 128 if bits == 8 else (data + 8).view(torch.uint8)
    padded = torch.nn.functional.pad(entries, (0, -data.shape[1] % (WORD_BITS // bits)))
    if bits == 4:
        low, high = padded.unflatten(1, (-1, 2)).unbind(-1)
        padded = low | high << 4
    return padded.contiguous().view(torch.int32)


def describe(formats: Mapping[str, str], quants: Quants, *, deepseek: bool, plain: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint.

    Args:
        formats: a module's name -> its format, one of `FORMS`.
        quants: format -> quantization of activations.
        deepseek: in DeepSeek's form.
        plain: names of modules that stay plain.
    """
    if deepseek:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": plain,
        }
    groups = {}
    patterns = find_patterns({**formats, **dict.fromkeys(plain, PLAIN)})
    for number, format in enumerate(sorted(set(formats.values()))):
        groups[f"group_{number}"] = {
            "targets": patterns[format],
            "weights": _describe_weights(format),
            "input_activations": describe_activations(format, quants.get(format)),
            "output_activations": None,
            "format": find_form(format, quants),
        }
    forms = {find_form(format, quants) for format in formats.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": patterns.get(PLAIN, []),
    }


def _describe_weights(format: str) -> dict[str, Any]:
    dtype, bits, (rows, columns) = FORMATS[format]
    if format in E2M1:
        strategy = "group" if format == "mxfp4" else "tensor_group"
        scales = "torch.uint8" if format == "mxfp4" else "torch.float8_e4m3fn"
        known = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
        return {**known, "group_size": columns, "scale_dtype": scales, "zp_dtype": scales}
    found: dict[str, Any] = {
        "num_bits": bits,
        "type": "float" if dtype.is_floating_point else "int",
        "symmetric": True,
        "dynamic": False,
    }
    if rows > 1:
        return {**found, "strategy": "block", "block_structure": [rows, columns]}
    return {**found, "strategy": "group", "group_size": columns} if columns else {**found, "strategy": "channel"}


def describe_activations(format: str, quant: ActivationQuant | None) -> dict[str, Any] | None:
    """The `input_activations` of a group. None also for FP8 beside integers of 4 bits, which is not read."""
    if quant is None or (quant.format == "fp8" and FORMATS[format][1] < 8):
        return None
    if quant.format == "mxfp4":
        scales = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        known = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": True}
        return {**known, "strategy": "group", "group_size": quant.group, **scales}
    bits, kind = (4 if quant.format == "int4" else 8), "float" if quant.format == "fp8" else "int"
    found = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True}
    return {**found, "strategy": "group", "group_size": quant.group} if quant.group else {**found, "strategy": "token"}


def find_patterns(formats: Mapping[str, str]) -> dict[str, list[str]]:
    """Targets by format: a regular expression for modules that differ in numbers alone, where all of them have the
    format; else the modules' names.

    Args:
        formats: a module's name -> its format.
    """
    alike: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, format in formats.items():
        alike[re.sub(r"\d+", "0", module)][format].append(module)
    found: dict[str, list[str]] = defaultdict(list)
    for of_format in alike.values():
        for format, modules in of_format.items():
            if len(of_format) > 1 or len(modules) == 1:
                found[format] += modules
            else:
                parts = re.split(r"\d+", modules[0])
                found[format].append("re:" + r"\d+".join(map(re.escape, parts)) + "$")
    return found
