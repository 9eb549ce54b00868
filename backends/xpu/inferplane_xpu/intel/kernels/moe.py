"""Mixture of experts: routing, rows sorted by expert, two grouped products, the weighted sum.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/moe and csrc/xpu/grouped_gemm; the order of calls from
fused_moe_interface.py of its wheel 0.1.16.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import FLOATS, declare_fused
from inferplane.plugin import Kernels, Packing, QTensor
from inferplane_xpu.intel.kernels.when import MATRIX, OPERATORS

vllm, moe, xpu = torch.ops._C, torch.ops._moe_C, torch.ops._xpu_C
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_xpu", features=MATRIX)
SCORED_ALREADY, SIGMOID = 0, 1
"""Values of grouped_topk's `scoring_func`."""
TOP_K = (1, 2, 4, 6, 7, 8, 10, 16)
"""Experts a token for which sorting and summing were compiled."""
MOST_EXPERTS, MOST_GROUPS, MOST_CHOSEN = 1024, 32, 32
FP8_BLOCK = 128
INT4 = ("int4_group", "int4_group64", "int4_group32")


def _is_ungrouped(op: Any) -> bool:
    return op.groups == 1 and (op.bias is None or op.score == "sigmoid")


def _has_supported_groups(op: Any) -> bool:
    return 1 < op.groups <= MOST_GROUPS and op.top_k <= MOST_CHOSEN and op.group_score == "top2"


@fused("moe_route", ("no groups, and a bias to sigmoid scores only", _is_ungrouped), dtypes=FLOATS, features=OPERATORS)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """_moe_C::topk_softmax or topk_sigmoid; the third tensor is a buffer that both need."""
    weights = logits.new_empty(logits.shape[0], view.top_k, dtype=torch.float32)
    ids, buffer = torch.empty_like(weights, dtype=torch.int64), torch.empty_like(weights, dtype=torch.int32)
    logits = logits.float().contiguous()
    if view.score == "sigmoid":
        bias = None if view.bias is None else view.bias.float()
        moe.topk_sigmoid(weights, ids, buffer, logits, view.renormalize, bias, view.factor, None)
        return weights, ids
    moe.topk_softmax(weights, ids, buffer, logits, view.renormalize, None, None)
    return weights * view.factor, ids


@fused(
    "moe_route",
    ("at most 32 groups, each judged by its best two experts", _has_supported_groups),
    dtypes=FLOATS,
    features=OPERATORS,
)
def moe_route_grouped(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """_moe_C::grouped_topk, which knows sigmoid alone: others are scored before; zeros stand for no bias."""
    logits = logits.float().contiguous()
    sigmoid = view.score == "sigmoid"
    scores = logits if sigmoid else logits.softmax(-1)
    bias = logits.new_zeros(logits.shape[1]) if view.bias is None else view.bias.float()
    scoring = SIGMOID if sigmoid else SCORED_ALREADY
    found: tuple[torch.Tensor, torch.Tensor] = moe.grouped_topk(
        scores, view.groups, view.top_groups, view.top_k, view.renormalize, view.factor, bias, scoring
    )
    return found


class Stack:
    """A stack of experts' weights as the grouped product reads it.

    Args:
        data: `[E, K, N]` in a float dtype or FP8; int4 as bytes `[E, N, K / 2]`, the even column in the low half.
        scale: None; of FP8 float32 `[E, K / 128, N / 128]`; of int4 `[E, N, K / group]` in the activations' dtype.
        rows: N.
    """

    def __init__(self, data: torch.Tensor, scale: torch.Tensor | None, rows: int) -> None:
        self.data, self.scale, self.rows = data, scale, rows
        self._cast: dict[torch.dtype, Stack] = {}

    def to_dtype(self, dtype: torch.dtype) -> Stack:
        """With everything that is to have the activations' dtype in it; cast once."""
        if dtype not in self._cast:
            expanded = self.scale is None and self.data.dtype is not dtype
            int4 = self.scale is not None and self.data.dtype is torch.int8
            scale = self.scale.to(dtype) if self.scale is not None and int4 else self.scale
            self._cast[dtype] = Stack(self.data.to(dtype) if expanded else self.data, scale, self.rows)
        return self._cast[dtype]


def _pack_plain(w: torch.Tensor) -> Stack:
    return Stack(w.transpose(1, 2).contiguous(), None, w.shape[1])


def _int4(q: QTensor) -> Stack:
    """The product knows no zero points: a stack that has some is expanded."""
    if q.zero is not None:
        return _pack_plain(q.dequantize(torch.bfloat16))
    low, high = q.data[..., 0::2] & 15, q.data[..., 1::2] & 15
    return Stack(low | (high << 4), q.scale.contiguous(), q.shape[-2])


def _fp8(q: QTensor) -> Stack:
    return Stack(q.data.transpose(1, 2).contiguous(), q.scale.transpose(1, 2).contiguous(), q.shape[-2])


EXPERTS = Packing("vllm_xpu.experts", _pack_plain)
INT4_EXPERTS = Packing("vllm_xpu.int4_experts", _int4, dense=True)
FP8_EXPERTS = Packing("vllm_xpu.fp8_experts", _fp8)


def _has_sizes_in_eights(op: Any) -> bool:
    return op.down.shape[1] % 8 == 0 and op.gate_up.shape[1] % 8 == 0


def _has_whole_groups(op: Any) -> bool:
    return op.gate_up.shape[2] % 128 == 0 and op.down.shape[2] % 128 == 0


def _has_whole_blocks(op: Any) -> bool:
    return all(size % FP8_BLOCK == 0 for w in (op.gate_up, op.down) for size in w.shape[1:])


NEEDS = (
    ("every expert on this rank, and at most 1024", lambda op: not op.partial and op.gate_up.shape[0] <= MOST_EXPERTS),
    ("hidden and expert sizes in eights", _has_sizes_in_eights),
)


def _multiply_silu(out: torch.Tensor, h: torch.Tensor) -> None:
    vllm.silu_and_mul(out, h)


def _run_experts(
    view: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activate: Callable[[torch.Tensor, torch.Tensor], None] = _multiply_silu,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Five calls; how many rows an expert has is known to the device alone."""
    weights, ids = _pad_to_compiled(weights, ids)
    up, down = view.gate_up.to_dtype(x.dtype), view.down.to_dtype(x.dtype)
    experts, (tokens, k), width = up.data.shape[0], ids.shape, x.shape[1]
    rows = x.new_empty(tokens * k, width)
    counts = ids.new_zeros(experts, dtype=torch.int32)
    places = ids.new_empty(tokens, k, dtype=torch.int32)
    moe.remap_hidden_states(x.contiguous(), None, rows, None, None, counts, places, ids.contiguous(), experts, experts)
    h = x.new_empty(tokens * k, up.rows)
    xpu.cutlass_grouped_gemm_interface(rows, None, up.data, up.scale, biases[0], h, counts, up.rows, width, experts)
    act = x.new_empty(tokens * k, up.rows // 2)
    activate(act, h)
    y = torch.empty_like(rows)
    xpu.cutlass_grouped_gemm_interface(
        act, None, down.data, down.scale, biases[1], y, counts, width, up.rows // 2, experts
    )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    moe.moe_gather(out, y, weights.float().contiguous(), places, experts)
    return out


def _pad_to_compiled(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As many experts a token as were compiled: a token's first one again, with weight 0."""
    k = ids.shape[1]
    if k in TOP_K:
        return weights, ids
    more = min(n for n in TOP_K if n > k) - k
    return torch.nn.functional.pad(weights, (0, more)), torch.cat((ids, ids[:, :1].expand(-1, more)), 1)


@fused("clamped_experts", *NEEDS, packs={"gate_up": EXPERTS, "down": EXPERTS})
def clamped_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts of gpt-oss: biases in the activations' dtype, and _C::swigluoai_and_mul over alternating columns."""

    def activate(out: torch.Tensor, h: torch.Tensor) -> None:
        vllm.swigluoai_and_mul(out, h, view.alpha, view.limit)

    return _run_experts(view, x, weights, ids, activate, (view.gate_up_bias, view.down_bias))


@fused("moe_experts", *NEEDS, packs={"gate_up": EXPERTS, "down": EXPERTS})
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts in the activations' dtype."""
    return _run_experts(view, x, weights, ids)


@fused(
    "moe_experts",
    *NEEDS,
    ("hidden and expert sizes in whole groups", _has_whole_groups),
    formats=INT4,
    packs={"gate_up": INT4_EXPERTS, "down": INT4_EXPERTS},
)
def moe_experts_int4(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights in int4, expanded within the product."""
    return _run_experts(view, x, weights, ids)


@fused(
    "moe_experts",
    *NEEDS,
    ("sizes in whole blocks of 128", _has_whole_blocks),
    formats=("fp8_block",),
    packs={"gate_up": FP8_EXPERTS, "down": FP8_EXPERTS},
)
def moe_experts_fp8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights in FP8 with a scale a block of 128 x 128, expanded within the product."""
    return _run_experts(view, x, weights, ids)
