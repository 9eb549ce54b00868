"""Quantizing the weights of a plain checkpoint while it is read: one weight at a time, straight to canonical form."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from inferplane.binding import Plan, PlanSettings, TensorSource
from inferplane.errors import CheckpointError, UsageError
from inferplane.ops.quantize import FORMATS, encode, limit, scales
from inferplane.quant.stored import QuantFormats
from inferplane.types import PLAIN, Kernel, KVRequest, QTensor, Shard


@dataclass(frozen=True)
class Scheme:
    """What a user may ask for.

    Args:
        dense: weight format of linear layers.
        experts: of routed experts.
        head: of the output head.
        acts: weight format -> how activations are coded that meet such weights; else they stay as they are.
    """

    dense: str
    experts: str
    head: str
    activation_quants: Mapping[str, str] = field(default_factory=dict)


SCHEMES = {
    "weight_only_int8": Scheme("int8_group", "int8_group", "int8_group"),
    "weight_only_int4": Scheme("int4_group32", "int4_group32", "int4_group32"),
    "a8w8": Scheme("int8_row", "int8_row", "int8_group", {"int8_row": "int8"}),
    "a8w8_fp8_wint4": Scheme("fp8_block", "int4_group64", PLAIN, {"fp8_block": "fp8", "int4_group64": "fp8"}),
}
"""By name. "a8w8": int8 by rows, activations in int8 where a kernel codes them, but for the head's. The last one is for
models with experts: FP8 in blocks of 128 x 128, experts in int4, activations in FP8 where a kernel codes them."""

HEAD = "lm_head.weight"
EXPERTS = ("*.experts.*_proj.weight", "*.experts.*.w[123].weight")
DENSE = ("*_proj.weight", "*_proj_with_mqa.weight")
"""Names of weights of linear layers. Norms and routers are read as they are, and embeddings that no head is tied to."""
LATENT = ("*.kv_b_proj.weight",)
"""Linear layers that attention also folds into the query: quantized where its kernels read them so."""

ROWS = 2048
"""Rows that are put in FP8 at a time, which bounds what is held in float32."""
NUMBERS = 2**19
"""Numbers that are put in integers at a time: what is made of them in between stays in a core's cache."""


def online(scheme: str, config: Mapping[str, Any], latent: Collection[str] = ()) -> QuantFormats:
    """Weight formats by name, and readers for them that quantize.

    Args:
        scheme: a name of `SCHEMES`.
        config: of the checkpoint.
        latent: formats in which the device's kernels read `kv_b_proj` (`latent_formats`): else it stays as it is,
            and so it does where the scheme codes activations for it, which attention does not.

    Raises:
        UsageError: an unknown scheme, or a checkpoint that is quantized already.
    """
    if scheme not in SCHEMES:
        raise UsageError(f"quantization = {scheme!r}.", there_is=f"None, {', '.join(map(repr, SCHEMES))}")
    if config.get("quantization_config"):
        raise UsageError(
            f"quantization = {scheme!r} for a checkpoint that is quantized already.",
            remedy="leave quantization out, or load the unquantized checkpoint",
        )
    s = SCHEMES[scheme]

    def format_of(name: str) -> str:
        def like(*patterns: str) -> bool:
            return any(fnmatch.fnmatchcase(name, p) for p in patterns)

        if like(*LATENT):
            return s.dense if s.dense in latent and s.dense not in s.activation_quants else PLAIN
        return s.head if name == HEAD else s.experts if like(*EXPERTS) else s.dense if like(*DENSE) else PLAIN

    return QuantFormats(
        format_of, s.activation_quants, {format: partial(_read, format=format) for format in _formats(s)}
    )


def formats_read_by_row(kernels: Iterable[Kernel], settings: PlanSettings) -> frozenset[str]:
    """Quantized formats of which some kernel reads single rows, as an embedding needs it.

    Args:
        kernels: of the device.
        settings: what the plan is made for.
    """
    return _formats_of("embedding", kernels, settings)


def latent_request(config: Mapping[str, Any]) -> KVRequest | None:
    """What a layer of latent attention remembers of a token; None: the config has no such attention."""
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    return KVRequest("mla", 1, rank + rope) if isinstance(rank, int) and isinstance(rope, int) else None


def latent_formats(
    kernels: Iterable[Kernel], settings: PlanSettings, layouts: Collection[str], pins: Mapping[str, str]
) -> frozenset[str]:
    """Quantized formats of `kv_b_proj` that some kernel folds into queries, and some expands latents with.

    Args:
        kernels: of the device.
        settings: what the plan is made for.
        layouts: names of the KV layouts, one of which the model's latents will have.
        pins: op name -> the provider that must serve it.
    """
    kernels = list(kernels)
    found = [
        _formats_of(op, [k for k in kernels if pins.get(op, k.provider) == k.provider], settings, layouts)
        for op in ("mla_absorbed", "mla_expanded")
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


def explain_no_savings(plan: Plan, scheme: str | None) -> list[str]:
    """What to tell whoever asked for `scheme` and gets weights that are as large as before.

    Args:
        plan: of the model, whose linear weights have the scheme's format.
        scheme: a name of `SCHEMES`; None: nobody asked.

    Returns:
        One sentence for a person, with what to do; none when every such weight stays quantized.
    """
    formats = _formats(SCHEMES[scheme]) if scheme in SCHEMES else frozenset()
    found = {op: ids for (op, expanded), ids in plan.expanded.items() if expanded in formats}
    if not found:
        return []
    count, every = len(set().union(*found.values())), sum(w.format in formats for w in plan.weights.values())
    dtype = str(plan.settings.dtype).removeprefix("torch.")
    do = "Leave" if dtype == "bfloat16" else "Ask for another dtype (bfloat16), or leave"
    return [
        f"quantization = {scheme!r} saves nothing for {count} of {every} weights: on device {plan.settings.device!r} "
        f"no kernel of {', '.join(sorted(found))} takes them quantized in {dtype}: they are rounded, then expanded. "
        f"{do} quantization out; explain has each kernel's reason."
    ]


def _formats(scheme: Scheme) -> frozenset[str]:
    return frozenset((scheme.dense, scheme.experts, scheme.head)) - {PLAIN}


def quantize(weight: torch.Tensor, format: str) -> QTensor:
    """A plain weight in symmetric groups of columns, or in FP8 blocks, by rounding to nearest.

    Scales of integers are rounded to float16 first, where they fit, so that a kernel may keep them in two bytes without
    changing a value.

    Args:
        weight: `[N, K]`, any floating dtype.
        format: one of `FORMATS`.

    Returns:
        A QTensor with float32 scales.
    """
    dtype, bits, (rows, columns) = FORMATS[format]
    n, k = weight.shape
    if dtype.is_floating_point:
        assert ROWS % rows == 0, format
        return QTensor.cat([encode(part, format) for part in weight.split(ROWS)])
    columns = columns or k
    groups, top = math.ceil(k / columns), limit(dtype, bits)
    data, scale, step = torch.empty(n, k, dtype=dtype), torch.empty(n, groups), max(1, NUMBERS // max(1, k))
    for first in range(0, n, step):
        w = weight[first : first + step].float()
        if groups * columns != k:
            w = torch.nn.functional.pad(w, (0, groups * columns - k))
        elif w.dtype is weight.dtype:
            w = w.clone()  # divided in place below
        tiles = w.unflatten(1, (groups, columns))
        exact = scales(tiles.abs().amax(-1), top)
        half = exact.half().float()
        s = torch.where((half > 0) & half.isfinite(), half, exact)
        rounded = tiles.div_(s[..., None]).round_().clamp_(-top, top)
        data[first : first + step] = rounded.flatten(1)[:, :k]
        scale[first : first + step] = s
    return QTensor(data, scale, block=(1, columns), bits=bits)


def _read(source: TensorSource, name: str, shard: Shard, format: str) -> QTensor:
    shape, dtype = source.shape(name), source.dtype(name)
    if shape is None or len(shape) != 2 or (dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1)):
        raise CheckpointError(
            f"{name} {shape} {dtype} cannot be quantized while it is read.",
            there_is="matrices of 16- or 32-bit floating-point numbers",
            remedy="leave quantization out",
        )
    if shard.size > 1:
        first, last = shard.bounds(shape[shard.axis])
        shape = (last - first, shape[1]) if shard.axis == 0 else (shape[0], last - first)
    plain = torch.empty(shape, dtype=torch.float32 if dtype is None else dtype)
    source.read_into(name, plain, shard)
    return quantize(plain, format)
