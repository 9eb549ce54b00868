"""What else is found on the machine to compare with: torch's own attention, FlashInfer, FlashAttention 3, FlashMLA."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

Calls = dict[str, Callable[[], Any]]
DEVICE = "cuda"


def offered(makers: dict[str, Callable[[], Any]]) -> Calls:
    """What each maker makes; one that fails becomes a call that says why, so that it costs its own row alone."""
    found: Calls = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:
            found[name] = _raising(f"{type(error).__name__}: {error}")
    return found


def _raising(words: str) -> Callable[[], Any]:
    def call() -> Any:
        raise RuntimeError(words)

    return call


def latent(op: Any, q: Any, weight: Any, batch: Any, kv: Any) -> Calls:
    """Attention to latents with queries already folded: our kernel's core alone, and libraries that are there."""
    plain = kv.layout == "paged_64" and kv.entries[0].dtype == torch.bfloat16
    if not plain or torch.cuda.get_device_capability() != (9, 0):
        return {}
    from inferplane_cuda.kernels.hopper import mla_launch as launch

    folded, _ = launch.fold_query(_View(weight, op.dims), *q)
    given = folded, op, batch, kv.entries[0][:-1].view(-1, 64, 1, 576)
    makers = {"gluon:attend": lambda: lambda: launch.launch_mla(folded, op.dims.heads, op.scale, batch, kv)}
    if find_spec("flash_mla") is not None:
        makers["flash_mla"] = lambda: _flash_mla(*given)
    if find_spec("flashinfer") is not None:
        makers["flashinfer"] = lambda: _flashinfer(*given)
    return offered(makers)


def _flash_mla(folded: torch.Tensor, op: Any, batch: Any, cache: torch.Tensor) -> Callable[[], Any]:
    import flash_mla

    sequences, new, heads = len(batch.seq_lens), batch.max_query_tokens, op.dims.heads
    plan = flash_mla.get_mla_metadata(batch.seq_lens, new * heads, 1)
    rows = folded.view(sequences, new, heads, 576)
    return lambda: flash_mla.flash_mla_with_kvcache(
        rows, cache, batch.block_tables, batch.seq_lens, 512, *plan, softmax_scale=op.scale, causal=True
    )


def _flashinfer(folded: torch.Tensor, op: Any, batch: Any, cache: torch.Tensor) -> Callable[[], Any]:
    import flashinfer.mla

    space = torch.empty(128 << 20, dtype=torch.uint8, device=cache.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="auto")
    counts = -(-batch.seq_lens // 64)
    starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    blocks = torch.cat([t[:n] for t, n in zip(batch.block_tables, counts.tolist())])
    wrapper.plan(
        batch.query_start, starts, blocks, batch.seq_lens, op.dims.heads, 512, 64, 64, True, op.scale, torch.bfloat16,
        torch.bfloat16,
    )  # fmt: skip
    rows, flat = folded.view(-1, op.dims.heads, 576), cache.view(-1, 64, 576)
    nope, rope = rows[..., :512].contiguous(), rows[..., 512:].contiguous()
    return lambda: wrapper.run(nope, rope, flat[..., :512], flat[..., 512:])


class _View:
    def __init__(self, kv_b: Any, dims: Any) -> None:
        self.kv_b, self.dims = kv_b, dims


def dense(op: Any, sequences: Any, *, few: bool) -> Calls:
    """torch's attention over keys that lie side by side, which no paged cache has: a bound more than a peer."""
    new, before = sequences[0]
    heads, kv_heads, dim, v_dim = (
        (op.heads, op.kv.heads, op.kv.dim, op.kv.v_dim)
        if op.name == "attention"
        else (op.dims.heads, op.dims.heads, op.dims.nope + op.dims.rope, op.dims.value)
    )

    def draw(n: int, h: int, d: int) -> torch.Tensor:
        return torch.randn(len(sequences), h, n, d, device=DEVICE, dtype=torch.bfloat16)

    q, k, v = draw(new, heads, dim), draw(new + before, kv_heads, dim), draw(new + before, kv_heads, v_dim)
    makers = {
        "torch SDPA, contiguous": lambda: (
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=not few, enable_gqa=True)
        )
    }
    if not few and find_spec("flash_attn_interface") is not None:
        makers["flash_attn_3, contiguous"] = lambda: _flash_attn(q, k, v)
    return offered(makers)


def _flash_attn(*dense: torch.Tensor) -> Callable[[], Any]:
    import flash_attn_interface

    q, k, v = (t.transpose(1, 2).contiguous() for t in dense)
    return lambda: flash_attn_interface.flash_attn_func(q, k, v, causal=True)
