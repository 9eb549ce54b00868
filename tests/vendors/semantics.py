"""What vendors' operators mean where they mean the same: vLLM's and FlashAttention's definitions, on host tensors.

Here is only what several vendors' sources say by pointing at one definition. Emulators that use it are not independent
of one another in it: they agree with each other by construction, which proves nothing, and an error here is in all of
them. What speaks against such an error is the ops' oracles, of which nothing here is made, and, where there is one, the
vendor's own library. What a vendor documents itself, limits and arithmetic of its own, is stated in its folder, even
where two say the same today.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.vendors import checks
from tests.vendors.emulator import require


def normalize(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm over the last dimension, float32 inside, in the dtype of `x`."""
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def add_normalize(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """residual <- residual + x; x <- norm(residual) weight, of the sum before it is rounded."""
    total = residual.float() + x.float()
    residual.copy_(total.to(residual.dtype))
    x.copy_(normalize(total, weight, epsilon).to(x.dtype))


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension, float32."""
    require(x.shape[-1] % 2 == 0, f"an even last dimension, got {list(x.shape)}")
    a, b = x.float().chunk(2, -1)
    return F.silu(a) * b


def rotate(
    heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, head_size: int, neox: bool
) -> torch.Tensor:
    """Heads `[T, heads * head_size]` rotated; the table is cosines, then sines, `[positions, head_size]`."""
    cos, sin = (part.float()[:, None] for part in table[positions].chunk(2, -1))
    h = heads.float().view(heads.shape[0], -1, head_size)
    a, b = h.chunk(2, -1) if neox else (h[..., 0::2], h[..., 1::2])
    both = (a * cos - b * sin, b * cos + a * sin)
    out = torch.cat(both, -1) if neox else torch.stack(both, -1).flatten(-2)
    return out.view(heads.shape).to(heads.dtype)


def check_heads(positions: torch.Tensor, table: torch.Tensor, head_size: int, heads: dict[str, torch.Tensor]) -> None:
    """Tensors `[T, heads * head_size]` that can be rotated by a table, at positions that it has."""
    checks.dtype(torch.int64, positions=positions)
    checks.contiguous(cos_sin_cache=table, **heads)
    checks.shape("cos_sin_cache", table, None, head_size)
    require(int(positions.min()) >= 0 and int(positions.max()) < len(table), "positions lie in the table")
    for name, t in heads.items():
        checks.shape(name, t, positions.shape[0], None)
        require(t.shape[1] % head_size == 0, f"{name} holds whole heads of {head_size}, got {t.shape[1]}")


def softmax_v(q, k, v, hidden, scale, sinks=None):
    """q [S, N, D], k [K, G, D], v [K, G, V]: float32 [S, N, V]; a query that sees nothing gives zeros. Sinks [N] are
    scores of a key more, without a value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("snd,knd->nsk", q.float(), k) * scale
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)), -1)
    return torch.einsum("nsk,knv->snv", scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[0]], v)


def latent_tokens(q, cache, block_table, lengths, width, scale):
    """Single tokens q [B, 1, N, D] over latents, whose first `width` entries are the values: [B, 1, N, width]."""
    out = torch.zeros(*q.shape[:3], width, dtype=q.dtype)
    for b, n in enumerate(lengths.tolist()):
        if n:
            keys = read_paged(cache, block_table[b], 0, n)
            out[b] = softmax_v(q[b], keys, keys[..., :width], None, scale).to(out.dtype)
    return out


def hidden_keys(count: int, first: int, length: int, left: int) -> torch.Tensor:
    """Which keys first to length the last `count` tokens must not see: causal, and `left` tokens back where >= 0."""
    i = torch.arange(count)[:, None] + length - count
    j = torch.arange(first, length)[None]
    return (j > i) if left < 0 else (j > i) | (j < i - left)


def check_running_sums(name: str, sums: torch.Tensor, last: int) -> list[int]:
    """Running sums of lengths as a list, checked."""
    checks.dtype(checks.INT32, **{name: sums})
    values = sums.tolist()
    require(values[0] == 0 and values == sorted(values), f"{name} is a running sum that begins with 0, got {values}")
    require(values[-1] == last, f"{name} ends with {last} rows, got {values[-1]}")
    return values


def read_paged(cache: torch.Tensor, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Tokens first to last of a sequence of a cache `[blocks, tokens, ...]`; blocks before them are not looked at."""
    tokens = cache.shape[1]
    blocks = table[first // tokens : -(-last // tokens)].long()
    require(bool(((blocks >= 0) & (blocks < cache.shape[0])).all()), "block_table names blocks of the cache")
    start = first // tokens * tokens
    return cache[blocks].flatten(0, 1)[first - start : last - start]


def written_slots(slot_mapping: torch.Tensor, rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that a cache write writes, and where; a negative slot is padding and skipped."""
    checks.dtype(torch.int64, slot_mapping=slot_mapping)
    checks.shape("slot_mapping", slot_mapping, rows)
    real = torch.nonzero(slot_mapping >= 0).flatten()
    places = slot_mapping[real]
    require(places.numel() == 0 or int(places.max()) < slots, f"slots lie below {slots}")
    require(len(set(places.tolist())) == places.numel(), "no slot is written twice")
    return real, places


def write_blocks(key, value, key_cache, value_cache, slot_mapping) -> None:
    """Rows `[T, heads, D]` into caches `[blocks, tokens, heads, D]`."""
    tokens = key_cache.shape[1]
    real, places = written_slots(slot_mapping, key.shape[0], key_cache.shape[0] * tokens)
    key_cache[places // tokens, places % tokens] = key[real]
    value_cache[places // tokens, places % tokens] = value[real]


def write_latents(kv_c, k_pe, kv_cache, slot_mapping) -> None:
    """Latents and their rotated parts side by side into a cache `[blocks, tokens, latent + rotated]`."""
    checks.shape("k_pe", k_pe, kv_c.shape[0], None)
    checks.shape("kv_cache", kv_cache, None, None, kv_c.shape[1] + k_pe.shape[1])
    tokens = kv_cache.shape[1]
    real, places = written_slots(slot_mapping, kv_c.shape[0], kv_cache.shape[0] * tokens)
    kv_cache[places // tokens, places % tokens] = torch.cat((kv_c, k_pe), -1)[real]


def gather(src_cache, dst, block_table, cu_seq_lens, batch_size) -> None:
    """Each sequence's entries of a cache `[blocks, tokens, D]`, one behind the other."""
    checks.dtype(checks.INT32, block_table=block_table)
    checks.shape("cu_seq_lens", cu_seq_lens, batch_size + 1)
    ends = check_running_sums("cu_seq_lens", cu_seq_lens, dst.shape[0])
    for table, a, b in zip(block_table, ends, ends[1:]):
        dst[a:b] = read_paged(src_cache, table, 0, b - a)


def plain_cache(kv_cache_dtype: str, **scales: torch.Tensor) -> None:
    """A cache in the plan's dtype, with scales of one number that stand for nothing."""
    require(kv_cache_dtype == "auto", f"kv_cache_dtype {kv_cache_dtype!r} is not emulated")
    one_scale(**scales)


def one_scale(**scales: torch.Tensor) -> None:
    """Each is a single float32 number."""
    for name, scale in scales.items():
        require(scale.numel() == 1 and scale.dtype is torch.float32, f"{name} is one float32")
