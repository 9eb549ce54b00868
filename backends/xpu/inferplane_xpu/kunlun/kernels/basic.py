"""Norms, rotary positions and activation by kunlun_ops; an output head in parts where torch's product is wrong.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/ops/_custom_ops.py and _kunlun_ops.py; its issue 387 for the head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.fused.needs import declare_fused
from inferplane.kernels.fused.operands import rotate_last_head_as_key
from inferplane.kernels.fused.packings import FLOAT32, RopeTable
from inferplane.plugin import Batch, Kernels, Packing
from inferplane_xpu.kunlun.kernels.when import KUNLUN, RANK_IN_PARTS
from inferplane_xpu.library import Library

kunlun = Library("kunlun_ops")
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="kunlun_ops", features=KUNLUN)
WIDEST_HALF = 65536
"""Rows of a float16 weight that F.linear is given at once; 248320 are known to give wrong sums."""


TABLE = Packing("kunlun_ops.rope_table", RopeTable)


@fused("rms_norm", packs={"weight": FLOAT32})
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.rmsnorm over contiguous rows, with its weight in float32."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    kunlun.rmsnorm(rows, view.weight, out, view.eps)
    return out.view(x.shape)


@fused("add_rms_norm", packs={"norm.weight": FLOAT32})
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """kunlun_ops.add_rmsnorm, which writes the norm and the sum into tensors of their own; the first layer has none."""
    if residual is None:
        return rms_norm(view.norm, x), x
    out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    kunlun.add_rmsnorm(
        x.contiguous(),
        residual.contiguous(),
        residual_output=total,
        weight=view.norm.weight,
        eps=view.norm.eps,
        output=out,
    )
    return out, total


@fused("rope", packs={"table": TABLE})
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.rotary_embedding, in place, of queries and keys at once: the last head goes as the key."""

    def rotate(rest: torch.Tensor, last: torch.Tensor) -> None:
        kunlun.rotary_embedding(
            positions=positions,
            query=rest,
            key=last,
            head_size=x.shape[-1],
            cos_sin_cache=view.table.to_dtype(x.dtype),
            is_neox=not view.interleaved,
        )

    return rotate_last_head_as_key(x, rotate)


@fused("silu_mul")
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.swiglu: SiLU of the first half times the second."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    kunlun.swiglu(x=x.contiguous(), y=out)
    return out


@fused("lm_head", provider="torch", dtypes=(torch.float16,), features=(), rank=RANK_IN_PARTS)
def lm_head_in_parts(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """F.linear some rows of the weight at a time: in float16 its sums are wrong where there are very many."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return torch.cat([F.linear(rows, part).float() for part in view.weight.split(WIDEST_HALF)], -1)
