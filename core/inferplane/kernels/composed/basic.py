"""Norms, linear layers, activations, rotary positions, sampling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops import AllGather, AllReduce, SampleTokens
from inferplane.ops.sampling import stable_topk as stable_topk
from inferplane.types import Batch, Kernels, PackedStorage, Packing, When

KERNELS = Kernels()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ANY = When(dtypes=FLOATS)
FLOAT32 = Packing("float32", lambda w: w.float(), storage=PackedStorage.of_tensors("1"))


def _is_plain(op: Any) -> bool:
    return op.out_dtype is None and op.activation_quant is None


def _has_float32_result(op: Any) -> bool:
    return op.out_dtype is torch.float32 and op.activation_quant is None


ONE_RANK = When(FLOATS, needs=(("one rank", lambda op: op.reduce is None),))
PLAIN = When(FLOATS, needs=(("activations and result in the plan's dtype", _is_plain),))
FLOAT32_RESULT = When(FLOATS, needs=(("a float32 result", _has_float32_result),))


@KERNELS("embedding", "torch", when=ONE_RANK, capture_safe=True, batch_invariant=True)
def embedding(view: Any, ids: torch.Tensor) -> torch.Tensor:
    """The op `embedding`: gather rows of the weight."""
    return F.embedding(ids, view.weight)


@KERNELS("rms_norm", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `rms_norm` by torch's own."""
    return F.rms_norm(x, view.weight.shape, view.weight, view.eps)


@KERNELS("add_rms_norm", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `add_rms_norm`: an addition, then torch's own RMS norm; returns norm and sum. Without a residual `x` is
    the sum.
    """
    s = x if residual is None else x + residual
    return F.rms_norm(s, view.norm.weight.shape, view.norm.weight, view.norm.eps), s


@KERNELS("linear", "torch", when=PLAIN, capture_safe=True)
def linear(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `linear` by torch's own matrix product, in the plan's dtype."""
    return F.linear(x, view.weight, view.bias)


@KERNELS("linear", "torch", when=FLOAT32_RESULT, packs={"weight": FLOAT32, "bias": FLOAT32}, capture_safe=True)
def linear_float32(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `linear` with a float32 result, for routers: weight and product are in float32 throughout."""
    return F.linear(x.float(), view.weight, view.bias)


@KERNELS("lm_head", "torch", when=ANY, capture_safe=True)
def lm_head(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The op `lm_head`: select the rows that need logits, multiply in the plan's dtype, widen to float32."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return F.linear(rows, view.weight).float()


@KERNELS("silu_mul", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `silu_mul`: SiLU of the first half of the columns times the second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@KERNELS("rope", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The op `rope`, in float32; cosines and sines are gathered once per token."""
    cos, sin = view.table[positions][:, :, None].unbind(1)
    h = x.float()
    if view.interleaved:
        a, b = h.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    a, b = h.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@KERNELS("sample", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def sample(
    view: Any,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """The op `sample` by its own body, which is nothing but torch operators on the device already."""
    return SampleTokens.__call__(view, logits, temperature, top_k, top_p, min_p, uniform)


@KERNELS("all_reduce", "torch", when=ANY, batch_invariant=True)
def all_reduce(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `all_reduce` by torch.distributed on the default group."""
    return AllReduce.__call__(view, x)


@KERNELS("all_gather", "torch", when=ANY, batch_invariant=True)
def all_gather(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `all_gather` by torch.distributed on the default group."""
    return AllGather.__call__(view, x)
