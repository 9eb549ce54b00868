"""What vendors' operators mean where they mean the same: vLLM's and FlashAttention's definitions, on host tensors."""

from __future__ import annotations

import torch

from tests.vendors import checks
from tests.vendors.emulator import require


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm over the last dimension, float32 inside, in the dtype of `x`."""
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def turned(t: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, head_size: int, neox: bool) -> torch.Tensor:
    """Heads `[T, heads * head_size]` rotated; the table is cosines, then sines, `[positions, head_size]`."""
    cos, sin = (part.float()[:, None] for part in table[positions].chunk(2, -1))
    h = t.float().view(t.shape[0], -1, head_size)
    a, b = h.chunk(2, -1) if neox else (h[..., 0::2], h[..., 1::2])
    both = (a * cos - b * sin, b * cos + a * sin)
    out = torch.cat(both, -1) if neox else torch.stack(both, -1).flatten(-2)
    return out.view(t.shape).to(t.dtype)


def softmax_v(q, k, v, hidden, scale):
    """q [S, N, D], k [K, G, D], v [K, G, V]: float32 [S, N, V]; a query that sees nothing gives zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("snd,knd->nsk", q.float(), k) * scale
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("nsk,knv->snv", scores.softmax(-1).nan_to_num(0.0), v)


def hidden_from(count: int, first: int, length: int, left: int) -> torch.Tensor:
    """Which keys first to length the last `count` tokens must not see: causal, and `left` tokens back where >= 0."""
    i = torch.arange(count)[:, None] + length - count
    j = torch.arange(first, length)[None]
    return (j > i) if left < 0 else (j > i) | (j < i - left)


def running(name: str, sums: torch.Tensor, last: int) -> list[int]:
    """Running sums of lengths as a list, checked."""
    checks.dtype(checks.INT32, **{name: sums})
    values = sums.tolist()
    require(values[0] == 0 and values == sorted(values), f"{name} is a running sum that begins with 0, got {values}")
    require(values[-1] == last, f"{name} ends with {last} rows, got {values[-1]}")
    return values


def paged(cache: torch.Tensor, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Tokens first to last of a sequence of a cache `[blocks, tokens, ...]`; blocks before them are not looked at."""
    tokens = cache.shape[1]
    blocks = table[first // tokens : -(-last // tokens)].long()
    require(bool(((blocks >= 0) & (blocks < cache.shape[0])).all()), "block_table names blocks of the cache")
    start = first // tokens * tokens
    return cache[blocks].flatten(0, 1)[first - start : last - start]


def written(slot_mapping: torch.Tensor, rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that a cache write writes, and where; a negative slot is padding and skipped."""
    checks.dtype(torch.int64, slot_mapping=slot_mapping)
    checks.shape("slot_mapping", slot_mapping, rows)
    real = torch.nonzero(slot_mapping >= 0).flatten()
    places = slot_mapping[real]
    require(places.numel() == 0 or int(places.max()) < slots, f"slots lie below {slots}")
    require(len(set(places.tolist())) == places.numel(), "no slot is written twice")
    return real, places


def one_scale(**scales: torch.Tensor) -> None:
    """Each is a single float32 number."""
    for name, scale in scales.items():
        require(scale.numel() == 1 and scale.dtype is torch.float32, f"{name} is one float32")
