"""Ops, steps and caches of the benchmarks, and every kernel that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.ops import Attention, MLAAbsorbed, MLADims, MLAExpanded, placeholder
from inferplane.ops.linear import Linear
from inferplane.types import Context, KVLayout, KVRequest
from inferplane.types.batch import Query, make_batch
from inferplane_cuda.backend import CudaBackend

DEVICE = "cuda"
BF16 = torch.bfloat16


LATENT_KV = "latent_64_fp8"
"""The layout for FP8 products, by its name: it shares its KV dtype with another one."""


def layout(kv: str) -> KVLayout:
    """The first with this KV dtype, or the one of this name."""
    return next(x for x in CudaBackend().kv_layouts(KVRequest("mla", 1, 576), BF16) if kv in (x.kv_dtype, x.name))


def kinds(op: Any) -> tuple[str, ...]:
    """The caches an op is tried on."""
    return ("auto", "fp8", "int8", *([LATENT_KV] if op.name == "mla_absorbed" else []))


def step(sequences: Sequence[tuple[int, int]], generator: torch.Generator) -> tuple[Any, int]:
    """A batch of `(query tokens, tokens before)` over scattered blocks, and how many blocks there are."""
    counts = [-(-(new + before) // 64) for new, before in sequences]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    queries = []
    for (new, before), count in zip(sequences, counts):
        blocks, order = order[:count], order[count:]
        queries.append(Query([0] * new, before, blocks))
    return make_batch(queries, block_tokens=64, device=DEVICE), sum(counts)


def filled(request: KVRequest, blocks: int, kv_dtype: str = "auto") -> Any:
    """A cache of random entries."""
    kv = layout(kv_dtype).build(request, blocks, BF16, torch.device(DEVICE))
    for first in range(0, blocks * 64, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), blocks * 64), device=DEVICE)
        if request.kind == "mla":
            kv.write(slots, torch.randn(len(slots), request.dim, device=DEVICE, dtype=BF16))
        else:
            shape = (len(slots), request.heads)
            kv.write(slots, *(torch.randn(*shape, d, device=DEVICE, dtype=BF16) for d in (request.dim, request.v_dim)))
    return kv


def absorbed(heads: int) -> MLAAbsorbed:
    dims = MLADims(heads, 128, 64, 128, 512)
    return MLAAbsorbed(placeholder(heads * 256, 512), dims, 192**-0.5, dims.request)


def expanded(heads: int) -> MLAExpanded:
    dims = MLADims(heads, 128, 64, 128, 512)
    return MLAExpanded(Linear(placeholder(heads * 256, 512)), dims, 192**-0.5, dims.request)


def attention(heads: int, kv_heads: int, dim: int, queries: str, window: int | None = None) -> Attention:
    return Attention(heads, dim**-0.5, KVRequest("gqa", kv_heads, dim, dim, window), queries)  # type: ignore[arg-type]


def view(op: Any, kernel: Any, ctx: Context, weight: torch.Tensor | None) -> Any:
    """What a kernel sees of an op."""
    fields = dict(op.items())
    if weight is not None:
        fields["kv_b"] = weight if op.name == "mla_absorbed" else SimpleNamespace(weight=weight)
    return SimpleNamespace(**fields, prepared=kernel.prepare(op, ctx) if kernel.prepare else None)


def kernels(op: Any, kv_dtype: str, *, few: bool) -> Iterator[tuple[Any, Context]]:
    """Every declared kernel that takes `op` here, the best first."""
    backend = CudaBackend()
    layouts = {r: layout(kv_dtype) for r in op.kv_requests()}
    ctx = Context(BF16, "decode" if few else "mixed", layouts, backend.open().features)
    for kernel in sorted(backend.kernels(), key=lambda k: -k.rank):
        if kernel.op == op.name and not kernel.refusals(op, ctx, op.formats()):
            yield kernel, ctx


def reference(op: Any, q: Any, batch: Any, kv: Any, weight: torch.Tensor | None) -> torch.Tensor:
    """The op's own body in float32 on the GPU."""
    wide = tuple(t.float() for t in q)
    fields = dict(op.items())
    if op.name == "mla_absorbed":
        fields["kv_b"] = weight.float()
    elif op.name == "mla_expanded":
        fields["kv_b"] = lambda x: x @ weight.float().t()
    body = SimpleNamespace(**fields)
    return type(op).__call__(body, *wide, batch, _Wide(kv))


class _Wide:
    """A cache whose `read` answers in float32."""

    def __init__(self, kv: Any) -> None:
        self.kv, self.block_tokens, self.request = kv, kv.block_tokens, kv.request

    def read(self, table: Any, tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.float() for t in self.kv.read(table, tokens))
