"""Norms, rotary positions and activation by kunlun_ops; an output head in parts where torch's product is wrong.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/ops/_custom_ops.py and _kunlun_ops.py; its issue 387 for the head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, Kernels, Packing, When
from inferplane_xpu.kunlun.kernels.when import FLOAT32, HALF, KUNLUN, RANK_FUSED, RANK_IN_PARTS
from inferplane_xpu.library import Library

kunlun = Library("kunlun_ops")
KERNELS = Kernels()
WIDEST_HALF = 65536
"""Rows of a float16 weight that F.linear is given at once; 248320 are known to give wrong sums."""


class Table:
    """Cosines and sines `[positions, D]`, kept in each dtype that is asked for: the operator wants the queries' own."""

    def __init__(self, table: torch.Tensor) -> None:
        self.whole = table.flatten(1).contiguous()
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The table in a dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.whole.to(dtype)
        return self._cast[dtype]


TABLE = Packing("kunlun_ops.rope_table", Table)


@KERNELS(
    "rms_norm",
    "kunlun_ops",
    rank=RANK_FUSED,
    when=When(HALF, features=KUNLUN),
    packs={"weight": FLOAT32},
    capture_safe=True,
)
def rms_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.rmsnorm over contiguous rows, with its weight in float32."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    kunlun.rmsnorm(rows, p.weight, out, p.eps)
    return out.view(x.shape)


@KERNELS(
    "add_rms_norm",
    "kunlun_ops",
    rank=RANK_FUSED,
    when=When(HALF, features=KUNLUN),
    packs={"norm.weight": FLOAT32},
    capture_safe=True,
)
def add_rms_norm(p: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """kunlun_ops.add_rmsnorm, which writes the norm and the sum into tensors of their own; the first layer has none."""
    if residual is None:
        return rms_norm(p.norm, x), x
    out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    kunlun.add_rmsnorm(
        x.contiguous(), residual.contiguous(), residual_output=total, weight=p.norm.weight, eps=p.norm.eps, output=out
    )
    return out, total


@KERNELS(
    "rope", "kunlun_ops", rank=RANK_FUSED, when=When(HALF, features=KUNLUN), packs={"table": TABLE}, capture_safe=True
)
def rope(p: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.rotary_embedding, in place, of queries and keys at once: the last head goes as the key."""
    tokens, heads, dim = x.shape
    last = x[:, -1].clone(memory_format=torch.contiguous_format)
    rest = x[:, : max(1, heads - 1)].clone(memory_format=torch.contiguous_format)
    kunlun.rotary_embedding(
        positions=positions,
        query=rest.view(tokens, -1),
        key=last,
        head_size=dim,
        cos_sin_cache=p.table.in_dtype(x.dtype),
        is_neox=not p.interleaved,
    )
    return torch.cat((rest, last[:, None]), 1) if heads > 1 else rest


@KERNELS("silu_mul", "kunlun_ops", rank=RANK_FUSED, when=When(HALF, features=KUNLUN), capture_safe=True)
def silu_mul(p: Any, x: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.swiglu: SiLU of the first half times the second."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    kunlun.swiglu(x=x.contiguous(), y=out)
    return out


@KERNELS("lm_head", "torch", rank=RANK_IN_PARTS, when=When((torch.float16,)), capture_safe=True)
def lm_head_in_parts(p: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """F.linear some rows of the weight at a time: in float16 its sums are wrong where there are very many."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return torch.cat([F.linear(rows, part).float() for part in p.weight.split(WIDEST_HALF)], -1)
