"""Hyper-connections on native kernels: streams are read once for all rows of `fn`, and mixed in registers."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import RANK_PORTABLE, Kernels, When
from inferplane_cpu.native import library
from inferplane_cpu.structs import Hyper

KERNELS = Kernels()
MAX_STREAMS = 8
"""csrc/model/hyper.h."""


def _has_few_streams(op: Any) -> bool:
    return bool(op.streams <= MAX_STREAMS)


def _has_float32_weights(op: Any) -> bool:
    return all(w.dtype is torch.float32 for w in (op.fn, op.base, op.scale))


STREAMS = (f"at most {MAX_STREAMS} streams", _has_few_streams)
FLOAT32 = ("weights in float32", _has_float32_weights)
ANY = When((torch.bfloat16, torch.float32), features=("native",))
COLLAPSE = When(ANY.dtypes, features=ANY.features, needs=(STREAMS, FLOAT32))
POST = When(ANY.dtypes, features=ANY.features, needs=(STREAMS,))
PRE = When(
    ANY.dtypes,
    features=ANY.features,
    needs=(
        (STREAMS[0], lambda op: _has_few_streams(op.collapse)),
        (FLOAT32[0], lambda op: _has_float32_weights(op.collapse)),
    ),
    extensions=("hyper_collapse", "sinkhorn"),
)


def _describe(collapse: Any, wide: bool, sinkhorn: Any = None, head: bool = False) -> Hyper:
    """What the library reads of an op `hyper_collapse`, with the `sinkhorn` behind it, or of an op `hyper_head`."""
    made = Hyper(streams=collapse.streams, width=collapse.fn.shape[1] // collapse.streams, head=head, wide=wide)
    made.fn, made.base, made.scale = (w.data_ptr() for w in (collapse.fn, collapse.base, collapse.scale))
    made.norm_eps, made.eps = collapse.norm_eps, collapse.eps
    if sinkhorn is not None:
        made.iterations, made.sinkhorn_eps = sinkhorn.iterations, sinkhorn.eps
    return made


def _collapse(hyper: Hyper, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    tokens, streams, width = x.shape
    y, post, mix = x.new_empty(tokens, width), torch.empty(tokens, streams), torch.empty(tokens, streams, streams)
    library().ip_hyper_pre(hyper, x.data_ptr(), tokens, y.data_ptr(), post.data_ptr(), mix.data_ptr())
    return y, post, mix


@KERNELS("hyper_pre", "native", when=PRE, rank=RANK_PORTABLE, batch_invariant=True)
def hyper_pre(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One call, whose threads share the rows of `fn`, then the columns of the streams."""
    wide = x.dtype is torch.float32
    return _collapse(view.once(("inferplane_cpu.hyper", wide), _describe, view.collapse, wide, view.sinkhorn), x)


@KERNELS("hyper_collapse", "native", when=COLLAPSE, rank=RANK_PORTABLE, batch_invariant=True)
def hyper_collapse(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `hyper_pre`, whose logits are left as they are."""
    return _collapse(view.once("inferplane_cpu.hyper", _describe, view, x.dtype is torch.float32), x)


@KERNELS("sinkhorn", "native", when=ANY, rank=RANK_PORTABLE, batch_invariant=True)
def sinkhorn(view: Any, logits: torch.Tensor) -> torch.Tensor:
    """Each matrix by one thread."""
    m = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    library().ip_sinkhorn(m.data_ptr(), m.shape[0], m.shape[-1], view.iterations, view.eps)
    return m


def _describe_sizes(view: Any, wide: bool) -> Hyper:
    return Hyper(streams=view.streams, width=view.width, wide=wide)


@KERNELS("hyper_post", "native", when=POST, rank=RANK_PORTABLE, batch_invariant=True)
def hyper_post(view: Any, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Each entry of all streams is read once, mixed in registers, and rounded once."""
    hyper = view.once("inferplane_cpu.hyper", _describe_sizes, view, x.dtype is torch.float32)
    y, x, post, mix = y.contiguous(), x.contiguous(), post.float().contiguous(), mix.float().contiguous()
    out = torch.empty_like(x)
    library().ip_hyper_post(hyper, y.data_ptr(), x.data_ptr(), post.data_ptr(), mix.data_ptr(), len(x), out.data_ptr())
    return out


@KERNELS("hyper_head", "native", when=COLLAPSE, rank=RANK_PORTABLE, batch_invariant=True)
def hyper_head(view: Any, x: torch.Tensor) -> torch.Tensor:
    """As `hyper_pre`, of the factors alone."""
    hyper = view.once("inferplane_cpu.hyper", _describe, view, x.dtype is torch.float32, None, True)
    x = x.contiguous()
    y = x.new_empty(len(x), x.shape[-1])
    library().ip_hyper_pre(hyper, x.data_ptr(), len(x), y.data_ptr(), None, None)
    return y
