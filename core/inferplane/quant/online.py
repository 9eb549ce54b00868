"""Quantizes a plain checkpoint on load: one weight at a time, directly to canonical form."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from inferplane.binding import Plan, PlanSettings, TensorSource
from inferplane.errors import CheckpointError, UsageError
from inferplane.ops import Embedding, MLAAbsorbed, MLAExpanded
from inferplane.ops.formats import FORMATS, MINIMUMS, encode, encode_nvfp4_with, find_nvfp4_factor, limit
from inferplane.quant.schemes import FP8_BLOCKS, FP8_ROWS, INT4_TOKENS, INT8_TOKENS, MXFP4_GROUPS
from inferplane.quant.stored import QuantFormats, find_stored_format
from inferplane.types import PLAIN, ActivationQuant, Kernel, KVRequest, QTensor, Shard, StoredWidths
from inferplane.types.qtensor import scales


@dataclass(frozen=True)
class OnlineScheme:
    """A value of the option `quantization`.

    Args:
        dense: weight formats of linear layers, the one with the smallest error first: each layer gets the first one
            that a kernel of the device reads.
        experts: weight formats of routed experts.
        head: weight formats of the output head; none: it stays plain.
        activation_quants: weight format -> quantization of the activations multiplied by such weights; none for
            other formats.
        stored: formats of checkpoints that are taken as they are.
        in_memory: weight formats of linear layers and experts that come before `dense` and `experts` where a kernel
            reads them, but which no file has.
    """

    dense: tuple[str, ...]
    experts: tuple[str, ...]
    head: tuple[str, ...]
    activation_quants: Mapping[str, ActivationQuant] = field(default_factory=dict)
    stored: tuple[str, ...] = ()
    in_memory: tuple[str, ...] = ()

    @property
    def formats(self) -> frozenset[str]:
        """Every format that a weight may get."""
        return frozenset((*self.in_memory, *self.dense, *self.experts, *self.head))


INT8 = ("int8_group", "int8_row")
INT4 = ("int4_group32", "int4_group64", "int4_group", "int4_row")
INT4_WITH_MINIMUMS = ("int4_min32",)
"""A minimum beside each scale takes an eighth of a bit more than groups of 32 without, and the mean squared error is
0.72 of theirs."""
INT4_BESIDE_FP8 = ("int4_group64", "int4_group", "int4_group32", "int4_row")
"""Groups of 64 columns or more are multiplied by activations in FP8 as FP8 numbers."""
FP8 = ("fp8_block", "fp8_row")
_TO_INT8 = {"int8_row": INT8_TOKENS}
_INT4_TO_INT8 = dict.fromkeys(INT4, INT8_TOKENS)
_INT4_TO_INT4 = dict.fromkeys(INT4, INT4_TOKENS)
_TO_FP8 = {"fp8_block": FP8_BLOCKS, "fp8_row": FP8_ROWS}
_A8W8 = OnlineScheme(("int8_row",), ("int8_row",), INT8, _TO_INT8)
_A8W8_FP8 = OnlineScheme(FP8, FP8, (), _TO_FP8, stored=FP8)

SCHEMES = {
    "weight_only_int8": OnlineScheme(INT8, INT8, INT8),
    "weight_only_int4": OnlineScheme(INT4, INT4, INT8, in_memory=INT4_WITH_MINIMUMS),
    "weight_only_mxfp4": OnlineScheme(("mxfp4",), ("mxfp4",), INT8),
    "weight_only_nvfp4": OnlineScheme(("nvfp4",), ("nvfp4",), INT8),
    "a8w8": _A8W8,
    "a8w8c8": _A8W8,
    "a8w8_fp8": _A8W8_FP8,
    "a8w8c8_fp8": _A8W8_FP8,
    "a8w4": OnlineScheme(INT4, INT4, INT8, _INT4_TO_INT8),
    "a4w4": OnlineScheme(INT4, INT4, INT8, _INT4_TO_INT4),
    "a4w4_mxfp4": OnlineScheme(("mxfp4",), ("mxfp4",), INT8, {"mxfp4": MXFP4_GROUPS}),
    "a8w8_fp8_wint4": OnlineScheme(FP8, INT4_BESIDE_FP8, (), {**_TO_FP8, **dict.fromkeys(INT4_BESIDE_FP8, FP8_BLOCKS)}),
}
"""Schemes by name (`engine.request.arguments` has the same names, and what c8 in one means). "weight_only_mxfp4" and
"weight_only_nvfp4": numbers of e2m1 with a scale per 32 or 16 columns. "a8w8": int8 with a scale per row and
activations in int8 if a kernel quantizes them, except for the head. "a8w8_fp8": FP8 in blocks of 128 x 128, or in rows
where a device reads only these; the head as it is, as in DeepSeek's checkpoints. "a8w4" and "a4w4": int4 in groups, and
activations in int8 or int4 with a scale per token if a kernel quantizes them; "a4w4_mxfp4": both in MXFP4. The last one
is for models with experts: FP8, and experts in int4, activations in FP8 if a kernel quantizes them."""

HEADS = {"int8": INT8, "int4": INT4, "none": ()}
"""Weight formats of the output head by the option `head_format`; "auto": those of the scheme."""
HEAD = "lm_head.weight"
EXPERTS = ("*.experts.*_proj.weight", "*.experts.*.w[123].weight")
DENSE = (
    *("*_proj.weight", "*_proj_with_mqa.weight", "*.in_proj_qkv*.weight", "*.in_proj_z.weight"),
    *("*.feed_forward.w[123].weight", "*.mlp.c_fc.weight", "*.indexer.wq_b.weight"),
)
"""Names of weights of linear layers. Norms, routers and embeddings without a tied head are not quantized."""
GATES = ("*.self_attn.[bg]_proj.weight", "*.self_attn.[fg]_[ab]_proj.weight")
"""Linear layers of gates and rates of decay, which are small and stay plain, as those of other delta nets."""
INDEX = ("*.indexer.wk.weight", "*.weights_proj.weight", *(f"*.compressor.{x}_proj.weight" for x in ("kv", "gate")))
"""Linear layers that decide which tokens are read, or compress them, and stay plain as routers do."""
LATENT = ("*.kv_b_proj.weight",)
"""Linear layers that attention also folds into the query: quantized if its kernels read the format."""

ROWS = 2048
"""Rows quantized to FP8 at a time, which bounds the float32 copy."""
NUMBERS = 2**19
"""Numbers quantized to integers at a time: intermediate results stay in a core's cache."""
REFITS = 3
"""Times that a group's scale and minimum are fitted to its entries anew. The mean squared error is 0.87 of that without
after three of them, and 0.86 after six."""
UNIT_COLUMNS = 256
"""Columns of which scales, and minimums, are integers times one number, so that a kernel may keep them in a byte each.
Their rounding adds half a percent to the mean squared error."""
UNIT_TOP = 127
MAX_ROUNDING = 0.06
"""Share of a group's scale, and of its range, by which rounding to integers of a unit may change scale and minimum."""


def find_role(name: str) -> str:
    """What a checkpoint tensor is to a scheme: "head", "experts", "latent", "dense", or "" for what stays plain."""

    def like(*patterns: str) -> bool:
        return any(fnmatch.fnmatchcase(name, p) for p in patterns)

    if like(*LATENT):
        return "latent"
    if like(*GATES, *INDEX):
        return ""
    return "head" if name == HEAD else "experts" if like(*EXPERTS) else "dense" if like(*DENSE) else ""


def quantize_on_load(
    scheme: str,
    config: Mapping[str, Any],
    latent: Collection[str] = (),
    chosen: Mapping[str, str] = MappingProxyType({}),
    head: str = "auto",
) -> QuantFormats:
    """Weight formats by tensor name, and readers that quantize to them.

    Args:
        scheme: a name of `SCHEMES`.
        config: the checkpoint's config.
        latent: formats in which the device's kernels read `kv_b_proj` (`latent_formats`). In other formats it is not
            quantized, nor if the scheme quantizes its activations, because attention does not.
        chosen: names of tensors -> the format that a kernel of their op reads (`choose_formats`); others get the
            scheme's first one.
        head: a value of the option `head_format`.

    Raises:
        UsageError: the scheme is unknown.
    """
    s = find_scheme(scheme, head)
    folded = next((f for f in s.dense if f in latent and f not in s.activation_quants), PLAIN)
    first = {"dense": s.dense[0], "experts": s.experts[0], "head": (*s.head, PLAIN)[0], "latent": folded}

    def format_of(name: str) -> str:
        return chosen.get(name) or first.get(find_role(name), PLAIN)

    def widths_of(name: str) -> StoredWidths | None:
        return StoredWidths(5, has_unit_scales=True) if format_of(name) in MINIMUMS else None

    readers: dict[str, Any] = {f: partial(_read, format=f) for f in s.formats}
    return QuantFormats(format_of, s.activation_quants, readers, widths_of=widths_of)


def find_scheme(name: str, head: str = "auto") -> OnlineScheme:
    """The scheme of a name, with other formats of the output head unless `head` is "auto" (`HEADS`).

    Raises:
        UsageError: the scheme is unknown.
    """
    check_scheme(name)
    return SCHEMES[name] if head == "auto" else replace(SCHEMES[name], head=HEADS[head])


def check_scheme(scheme: str) -> None:
    """Raise UsageError for a name that is none of `SCHEMES`."""
    if scheme not in SCHEMES:
        raise UsageError(f"quantization = {scheme!r}.", there_is=f"None, {', '.join(map(repr, SCHEMES))}")


def takes_as_stored(scheme: str, config: Mapping[str, Any]) -> bool:
    """Whether a scheme takes a quantized checkpoint as it is: its weights are in a format of the scheme's already."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") == "gguf" or not SCHEMES[scheme].stored:
        return False
    return find_stored_format(settings) in SCHEMES[scheme].stored


def formats_read_by_row(kernels: Iterable[Kernel], settings: PlanSettings) -> frozenset[str]:
    """Quantized formats for which the device has an embedding kernel, so that single rows can be read.

    Args:
        kernels: the device's kernels.
        settings: what the plan is made for.
    """
    return _formats_of(Embedding.name, kernels, settings)


def latent_request(config: Mapping[str, Any]) -> KVRequest | None:
    """The cache request of latent attention; None if the config has no latent attention."""
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    return KVRequest("mla", 1, rank + rope, rope=rope) if isinstance(rank, int) and isinstance(rope, int) else None


def latent_formats(
    kernels: Iterable[Kernel], settings: PlanSettings, layouts: Collection[str], pins: Mapping[str, str]
) -> frozenset[str]:
    """Quantized formats of `kv_b_proj` that the device has kernels for in both absorbed and expanded attention.

    Args:
        kernels: the device's kernels.
        settings: what the plan is made for.
        layouts: names of the KV layouts that the model's latents may have.
        pins: op name -> the only provider allowed for it.
    """
    kernels = list(kernels)
    found = [
        _formats_of(op, [k for k in kernels if pins.get(op, k.provider) == k.provider], settings, layouts)
        for op in (MLAAbsorbed.name, MLAExpanded.name)
    ]
    return found[0] & found[1]


def _formats_of(
    op: str, kernels: Iterable[Kernel], settings: PlanSettings, layouts: Collection[str] | None = None
) -> frozenset[str]:
    found = [k.when for k in kernels if k.op == op and (k.batch_invariant or not settings.deterministic)]
    fitting = [w for w in found if settings.dtype in w.dtypes and not settings.features.lacking(w.features)]
    if layouts is not None:
        fitting = [w for w in fitting if not w.kv_layouts or set(w.kv_layouts) & set(layouts)]
    return frozenset(f for w in fitting for f in w.formats) - {PLAIN}


def explain_no_savings(plan: Plan, scheme: str | None, instead: Sequence[str] = ()) -> list[str]:
    """A warning if `scheme` saves no memory, because the device's kernels need weights dequantized.

    Args:
        plan: the model's plan; its linear weights have the scheme's format.
        scheme: a name of `SCHEMES`; None: no scheme.
        instead: other schemes, whose formats the device's kernels read.

    Returns:
        One message for the user, with what to do; empty if every such weight stays quantized.
    """
    formats = SCHEMES[scheme].formats if scheme in SCHEMES else frozenset()
    found = {op: ids for (op, format), ids in plan.dequantized.items() if format in formats}
    if not found:
        return []
    count, every = len(set().union(*found.values())), sum(w.format in formats for w in plan.weights.values())
    dtype = str(plan.settings.dtype).removeprefix("torch.")
    do = "Leave" if dtype == "bfloat16" else "Choose another dtype (bfloat16), or leave"
    if instead:
        do = f"Choose {' or '.join(instead)}, which its kernels read, or leave"
    return [
        f"quantization = {scheme!r} saves nothing for {count} of {every} weights: on device {plan.settings.device!r} "
        f"no kernel of {', '.join(sorted(found))} reads them quantized in {dtype}: they are quantized and dequantized. "
        f"{do} quantization out; explain has each kernel's reason."
    ]


def quantize(weight: torch.Tensor, format: str) -> QTensor:
    """Quantize a plain weight to groups of columns, to FP8 blocks or to e2m1, by rounding to nearest.

    With minimums see `_quantize_from_minimum`; other groups are symmetric. In 4 bits the entry of the largest magnitude
    of a group becomes -8, so that a step is an eighth of it and not a seventh; the scale has the other sign. Scales of
    integers are rounded to float16 first if they fit, so that a kernel may keep them in two bytes without changing any
    value.

    Args:
        weight: `[N, K]`, any floating dtype.
        format: one of `FORMATS`.

    Returns:
        A QTensor with float32 scales.

    Source: llama.cpp's type Q4_0, for the scales of 4 bits.
    """
    dtype, bits, (rows, columns) = FORMATS[format]
    n, k = weight.shape
    if format == "nvfp4":
        factor = find_nvfp4_factor(max_magnitude(weight))
        return QTensor.cat([encode_nvfp4_with(part.float().contiguous(), factor) for part in weight.split(ROWS)])
    if dtype.is_floating_point or format == "mxfp4":
        assert ROWS % rows == 0, format
        return QTensor.cat([encode(part, format) for part in weight.split(ROWS)])
    columns, step = columns or k, max(1, NUMBERS // max(1, k))
    if format in MINIMUMS:
        return QTensor.cat([_quantize_from_minimum(part, format) for part in weight.split(step)])
    groups, top = math.ceil(k / columns), limit(dtype, bits)
    lowest = -top - 1 if bits == 4 else -top
    data, scale = torch.empty(n, k, dtype=dtype), torch.empty(n, groups)
    for first in range(0, n, step):
        w = weight[first : first + step].float()
        if groups * columns != k:
            w = torch.nn.functional.pad(w, (0, groups * columns - k))
        elif w.dtype is weight.dtype:
            w = w.clone()  # divided in place below
        tiles = w.unflatten(1, (groups, columns))
        s = _round_to_float16(find_signed_scales(tiles) if bits == 4 else scales(tiles.abs().amax(-1), top))
        rounded = tiles.div_(s[..., None]).round_().clamp_(lowest, top)
        data[first : first + step] = rounded.flatten(1)[:, :k]
        scale[first : first + step] = s
    return QTensor(data, scale, block=(1, columns), bits=bits)


def _quantize_from_minimum(weight: torch.Tensor, format: str) -> QTensor:
    """Quantize to steps from a minimum, scale and minimum of each group fitted to its entries by least squares, and
    rounded to integers times a number in float16 per `UNIT_COLUMNS`.

    Entries follow from scale and minimum, and these from entries, `REFITS` times. A group with NaN or an infinity is
    NaN as a whole. Columns that a last group lacks are taken to equal the last one.

    Source: GGUF's type Q4_K, for integers as scales and minimums. The fit is linear regression.
    """
    dtype, bits, block = FORMATS[format]
    (n, k), top, columns = weight.shape, MINIMUMS[format], block[1]
    w = weight.float()
    if k % columns:
        w = torch.cat((w, w[:, -1:].expand(n, -k % columns)), 1)
    tiles = w.unflatten(1, (-1, columns))
    is_finite = tiles.isfinite().all(-1)
    tiles = torch.where(is_finite[..., None], tiles, 0.0)
    least, most = tiles.aminmax(dim=-1)
    minimum = least
    scale = torch.where(most > minimum, most / top - minimum / top, 0.0)

    def find_entries() -> torch.Tensor:
        return (tiles - minimum[..., None]).div_(scale[..., None]).nan_to_num_(0.0).round_().clamp_(0, top)

    for _ in range(REFITS):
        entries = find_entries()
        mean, mean_of_tile = entries.mean(-1), tiles.mean(-1)
        variance = entries.square().mean(-1) - mean.square()
        covariance = entries.mul_(tiles).mean(-1) - mean * mean_of_tile
        fits = (variance > 0) & (covariance > 0) & covariance.isfinite()
        scale = torch.where(fits, covariance / variance, scale)
        minimum = torch.where(fits, mean_of_tile - scale * mean, minimum)
    exact, groups = (torch.where(scale > 0, scale, 1.0), minimum), UNIT_COLUMNS // columns
    scale, minimum = _round_to_units(scale, groups, least=1), _round_to_units(minimum, groups, least=-UNIT_TOP)
    # Beside an outlier a unit is too coarse for the others: then the numbers of the row are rounded one by one.
    off = ((scale / exact[0] - 1).abs() > MAX_ROUNDING) & (most > least)
    off = (off | ((minimum - exact[1]).abs() > MAX_ROUNDING * exact[0] * top)).any(1, keepdim=True)
    scale, minimum = (torch.where(off, _round_to_float16(e), r) for e, r in zip(exact, (scale, minimum)))
    data = find_entries().flatten(1)[:, :k].to(dtype)
    scale, minimum = (numbers.masked_fill(~is_finite, torch.nan) for numbers in (scale, minimum))
    return QTensor(data, scale, block=block, bits=bits, minimum=minimum)


def _round_to_units(numbers: torch.Tensor, groups: int, least: int) -> torch.Tensor:
    """Numbers `[n, all groups]` rounded to integers, from `least` to `UNIT_TOP`, times one number per `groups` of
    them."""
    count = numbers.shape[1]
    wide = torch.nn.functional.pad(numbers, (0, -count % groups)).unflatten(1, (-1, groups))
    unit = _round_to_float16(wide.abs().amax(-1, keepdim=True) / UNIT_TOP)
    unit = torch.where(unit == 0, torch.ones_like(unit), unit)
    return (wide / unit).round_().clamp_(least, UNIT_TOP).mul_(unit).flatten(1)[:, :count]


def _round_to_float16(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to float16, but those that it does not hold or makes zero."""
    half = numbers.half().float()
    return torch.where((half != 0) & half.isfinite(), half, numbers)


def max_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of a matrix, float32 of shape `[]`."""
    parts = [part.float().abs().nan_to_num(0.0, posinf=0.0).amax() for part in weight.split(ROWS) if part.numel()]
    return torch.stack(parts).amax() if parts else torch.zeros(())


def find_signed_scales(tiles: torch.Tensor) -> torch.Tensor:
    """Scales of groups `[..., columns]` by which the entry of the largest magnitude becomes -8; 1 for zeros."""
    least, most = tiles.aminmax(dim=-1)
    extreme = torch.where(-least >= most, least, most)
    exact = extreme / -8
    return torch.where(exact == 0, torch.ones_like(exact), exact)


def _read(source: TensorSource, name: str, shard: Shard, format: str) -> QTensor:
    shape, dtype = source.shape(name), source.dtype(name)
    if shape is None or len(shape) != 2 or (dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1)):
        raise CheckpointError(
            f"{name} {shape} {dtype} cannot be quantized while it is read.",
            there_is="matrices of 16- or 32-bit floating-point numbers",
            remedy="leave quantization out",
        )
    if not shard.is_whole:
        first, last = shard.bounds(shape[shard.axis])
        shape = (last - first, shape[1]) if shard.axis == 0 else (shape[0], last - first)
    plain = torch.empty(shape, dtype=torch.float32 if dtype is None else dtype)
    source.read_into(name, plain, shard)
    return quantize(plain, format)
