"""Mixture of experts on native kernels: only chosen experts are read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.composed.moe import clamped_experts as clamped_experts_torch
from inferplane.kernels.composed.moe import moe_experts as moe_experts_torch
from inferplane.kernels.composed.moe import moe_route as moe_route_torch
from inferplane.kernels.fused.needs import ALL_EXPERTS_LOCAL
from inferplane.plugin import PLAIN, RANK_PORTABLE, KernelError, Kernels, When
from inferplane_cpu.kernels.linear import INT8_ACTIVATIONS, RANK_BATCH_INVARIANT, fits_int8_sums
from inferplane_cpu.kernels.narrow_inputs import NARROW_INPUTS
from inferplane_cpu.kernels.packing import (
    INT8_ROW_FORMATS,
    MAX_INT8_COLUMNS,
    PANEL_FORMATS,
    Adapt,
    adapt_matrices,
    prepare_any_order,
)
from inferplane_cpu.kernels.panel_storage import MXFP4_PACKING, PACKING
from inferplane_cpu.kernels.rowwise import gate_limits
from inferplane_cpu.native import SCORES, current_instruction_set, library
from inferplane_cpu.structs import ClampedGate, Experts

KERNELS = Kernels()
NO_SUCH_EXPERT = -1
"""What `ip_moe` returns where an id names no expert."""
FEW_ROWS = 256
"""With more tokens each expert has enough rows for oneDNN's products to be faster."""


def _has_bf16_weights(op: Any) -> bool:
    return all(w.dtype in (None, torch.bfloat16) for _, w in op.weights())


MAX_EXPERTS = 1024
"""csrc/model/expert_routing.h."""


def _has_routing_bias(op: Any) -> bool:
    experts = MAX_EXPERTS if op.bias is None else op.bias.shape[0]
    return experts <= MAX_EXPERTS and (op.bias is None or op.bias.dtype is torch.float32)


ROUTE = When(
    (torch.bfloat16,),
    features=("native",),
    needs=(("a float32 bias of at most 1,024 experts", _has_routing_bias),),
    extensions=("moe_route.least_sum", "moe_route.sum_eps", "moe_route.sqrtsoftplus"),
)
HASH_ROUTE = When((torch.bfloat16,), features=("native",))
LIMITS = ("moe_experts.limit", "moe_experts.limits_input")
NEEDS = (("bfloat16 weights", _has_bf16_weights), ALL_EXPERTS_LOCAL)
STORED = When((torch.bfloat16,), (PLAIN, "fp8_block"), features=("native",), needs=NEEDS, extensions=LIMITS)
CLAMPED = When((torch.bfloat16,), features=("native",), needs=NEEDS)
PACKED = When((torch.bfloat16,), PANEL_FORMATS, features=("native",), needs=NEEDS, extensions=LIMITS)
INT8_ROW_WEIGHTS = When(
    (torch.bfloat16,),
    INT8_ROW_FORMATS,
    features=("native",),
    needs=(
        *NEEDS,
        (f"at most {MAX_INT8_COLUMNS} columns", lambda op: fits_int8_sums(op.gate_up) and fits_int8_sums(op.down)),
    ),
    extensions=LIMITS,
)
STACKS = {"gate_up": PACKING, "down": PACKING}
MXFP4_STACKS = dict.fromkeys(STACKS, MXFP4_PACKING)


def _in_formats(names: tuple[str, ...], formats: str) -> When:
    """Conditions of clamped experts, whose biases are plain, with weights in `names`, which `formats` says in words."""
    holds = lambda op: op.gate_up.format in names and op.down.format in names  # noqa: E731
    return replace(CLAMPED, formats=(PLAIN, *names), needs=(*NEEDS, (f"{formats} in both weights", holds)))


CLAMPED_PACKED = _in_formats(tuple(format for format in PANEL_FORMATS if format != "mxfp4"), "8 or 4 bits")
CLAMPED_MXFP4 = _in_formats(("mxfp4",), "MXFP4")


class NativeExperts:
    """Experts of op `moe_experts` or `clamped_experts` as the library reads them.

    Attributes: `gate_up` and `down`, arrays of `Matrix`; `clamped`, the address of a `ClampedGate`, or None; `limits`,
    a `GateLimits`, or None.

    Args:
        view: of the experts' site.
        adapt: what the kernel prepared.
    """

    def __init__(self, view: Any, adapt: Adapt) -> None:
        self.gate_up = adapt_matrices(adapt, view.gate_up, getattr(view, "gate_up_bias", None))
        self.down = adapt_matrices(adapt, view.down, getattr(view, "down_bias", None))
        self._gate = ClampedGate(view.alpha, view.limit) if hasattr(view, "alpha") else None
        self.clamped = None if self._gate is None else ctypes.addressof(self._gate)
        self.limits = gate_limits(view) if hasattr(view, "limits_input") else None


def _describe(view: Any) -> NativeExperts:
    return NativeExperts(view, view.prepared)


def missing_expert_error(ids: torch.Tensor, experts: int) -> KernelError:
    """Of ids `[T, k]` at least one names none of the experts."""
    token, choice = ((ids < 0) | (ids >= experts)).nonzero()[0].tolist()
    return KernelError(
        f"moe_experts got expert {int(ids[token, choice])}, by token {token} of {len(ids)}.",
        there_is=f"experts 0 to {experts - 1}",
        remedy="pin another provider of moe_route, which chooses them, as in ops={'moe_route': 'reference'}",
    )


def _experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    experts: NativeExperts = view.once("inferplane_cpu.experts", _describe, view)
    if ids.shape != weights.shape or len(ids) != len(x):  # native code would read past their ends
        raise ValueError(f"Experts {tuple(ids.shape)} with weights {tuple(weights.shape)} for {len(x)} tokens.")
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    out = torch.empty_like(x)
    done = library().ip_moe(
        experts.gate_up,
        experts.down,
        len(experts.gate_up),
        experts.clamped,
        experts.limits,
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        ids.data_ptr(),
        weights.data_ptr(),
        ids.shape[1],
        out.data_ptr(),
    )
    if done == NO_SUCH_EXPERT:
        raise missing_expert_error(ids, len(experts.gate_up))
    return out


@KERNELS("moe_experts", "native", when=STORED, rank=RANK_BATCH_INVARIANT, batch_invariant=True)
def moe_experts_batch_invariant(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each expert's gate and up, then its down, by all tokens that chose it; a token's sum in its own order."""
    return _experts(view, x, weights, ids)


@KERNELS("moe_experts", "native", when=STORED, rank=RANK_PORTABLE, prepare=prepare_any_order)
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Few tokens by native products, many by oneDNN's, on the same weights; on AVX2 oneDNN has none in bf16."""
    return _experts_or_torch(moe_experts_torch, view, x, weights, ids)


def _experts_or_torch(
    by_torch: Callable[..., torch.Tensor], view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    if x.shape[0] <= FEW_ROWS or not isinstance(view.gate_up, torch.Tensor) or current_instruction_set() == "avx2":
        return _experts(view, x, weights, ids)
    least, most = ids.aminmax()
    if least < 0 or most >= len(view.gate_up):
        raise missing_expert_error(ids, len(view.gate_up))
    return by_torch(view, x, weights, ids)


@KERNELS("moe_experts", "native", when=PACKED, packs=STACKS, rank=RANK_PORTABLE, batch_invariant=True)
def moe_experts_panels(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `moe_experts_batch_invariant`, for weights of 8 and 4 bits."""
    return _experts(view, x, weights, ids)


@KERNELS(
    "moe_experts",
    "native",
    when=INT8_ROW_WEIGHTS,
    packs=STACKS,
    rank=RANK_PORTABLE,
    batch_invariant=True,
    **INT8_ACTIVATIONS,
)
def moe_experts_w8a8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `moe_experts_batch_invariant`, with activations in 8 bits before both products."""
    return _experts(view, x, weights, ids)


@KERNELS("clamped_experts", "native", when=CLAMPED, rank=RANK_BATCH_INVARIANT, batch_invariant=True)
def clamped_experts_batch_invariant(
    view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """As `moe_experts_batch_invariant`, with biases and a clamped gate; what is clamped is not rounded before."""
    return _experts(view, x, weights, ids)


@KERNELS("clamped_experts", "native", when=CLAMPED, rank=RANK_PORTABLE, prepare=prepare_any_order)
def clamped_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `moe_experts`, with biases and a clamped gate."""
    return _experts_or_torch(clamped_experts_torch, view, x, weights, ids)


@KERNELS("clamped_experts", "native", when=CLAMPED_PACKED, packs=STACKS, rank=RANK_PORTABLE, batch_invariant=True)
def clamped_experts_panels(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `clamped_experts_batch_invariant`, for weights of 8 and 4 bits."""
    return _experts(view, x, weights, ids)


@KERNELS("clamped_experts", "native", when=CLAMPED_MXFP4, packs=MXFP4_STACKS, rank=RANK_PORTABLE, batch_invariant=True)
def clamped_experts_mxfp4(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `clamped_experts_batch_invariant`, for weights in MXFP4, whose entries are looked up as they are read."""
    return _experts(view, x, weights, ids)


def _make_narrow(name: str) -> Callable[..., torch.Tensor]:
    """A kernel of this name: as `moe_experts_panels`, with activations of at most 8 bits before both products."""

    def experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return _experts(view, x, weights, ids)

    experts.__name__ = name
    return experts


for narrow in NARROW_INPUTS:
    for op, when, packs in (
        ("moe_experts", replace(PACKED, formats=narrow.weights), STACKS),
        (
            "clamped_experts",
            _in_formats(narrow.weights, ", ".join(narrow.weights)),
            MXFP4_STACKS if narrow.weights == ("mxfp4",) else STACKS,
        ),
    ):
        KERNELS(op, "native", when=when, packs=packs, rank=RANK_PORTABLE, batch_invariant=True, **narrow.options(2))(
            _make_narrow(f"{op}_{narrow.name}")
        )


def describe_routing(view: Any, experts: int) -> Experts:
    """What `ip_route_experts` reads of a site's `moe_route`."""
    made = Experts(experts=experts, top=view.top_k, groups=view.groups, top_groups=view.top_groups, factor=view.factor)
    made.bias = None if view.bias is None else view.bias.data_ptr()
    made.score, made.best_two = SCORES[view.score], view.group_score == "top2"
    made.renormalize, made.least_sum, made.sum_eps = view.renormalize, view.least_sum, view.sum_eps
    return made


@KERNELS("moe_route", "native", when=ROUTE, rank=RANK_PORTABLE, batch_invariant=True)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the native layers choose, the first among equals; torch's operators for more experts than they take."""
    rows, experts = logits.shape
    if experts > MAX_EXPERTS:
        return moe_route_torch(view, logits)
    found = view.once("inferplane_cpu.routing", describe_routing, view, experts)
    logits = logits.float().contiguous()
    weights, ids = torch.empty(rows, view.top_k), torch.empty(rows, view.top_k, dtype=torch.int64)
    library().ip_route_experts(found, logits.data_ptr(), rows, ids.data_ptr(), weights.data_ptr())
    return weights, ids


def _describe_hash_routing(view: Any, experts: int) -> Experts:
    return Experts(
        experts=experts,
        top=view.table.shape[1],
        factor=view.factor,
        score=SCORES[view.score],
        renormalize=view.renormalize,
    )


@KERNELS("hash_route", "native", when=HASH_ROUTE, rank=RANK_PORTABLE, batch_invariant=True)
def hash_route(view: Any, logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The table by torch, weights as `moe_route` computes them."""
    rows, experts = logits.shape
    found = view.once("inferplane_cpu.routing", _describe_hash_routing, view, experts)
    chosen = view.table[ids].long() % experts
    logits, weights = logits.float().contiguous(), torch.empty(chosen.shape)
    library().ip_expert_weights(found, logits.data_ptr(), rows, chosen.data_ptr(), weights.data_ptr())
    return weights, chosen
