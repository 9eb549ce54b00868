"""Drawing tokens: temperature, top-k, top-p and min-p without sorting, one program a row.

Sums are whole numbers, as the op has them, so a row's token is a function of that row alone. What the op finds in a
sorted row is found here by descending through the logits' bits, four at a time: the k-th largest logit, that at which
top-p is reached, that at which the random share is. Equal logits stand in the order of their ids, so of those at a
threshold the first few count.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.ops.sampling import UNIFORM_BITS, WEIGHT_BITS

ONE = tl.constexpr(float(2**WEIGHT_BITS))
DRAWN_BITS = tl.constexpr(UNIFORM_BITS)
DRAWN = tl.constexpr(2**UNIFORM_BITS)
LOWEST = tl.constexpr(-2147483648)


@triton.jit
def keys_of(x):
    """Whole numbers of 32 bits (int64) that are ordered as the float32 numbers `x` are; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) - LOWEST


@triton.jit
def logit_of(key):
    """The number that has this key."""
    bits = (key + LOWEST).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(x, highest, heat):
    """Probabilities up to a factor, int64: the likeliest token's is 2^40."""
    return (tl.exp(tl.div_rn(x - highest, heat)) * ONE).to(tl.int64)


@triton.jit
def mass_from(
    row, bounds, highest, heat, above, least, vocab, BLOCK: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """For each of N keys `bounds`: how many tokens (COUNT), or how much weight, have that key or a higher one. Tokens
    count whose key is above `above` and whose weight is at least `least`.
    """
    total = tl.zeros([N], tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(row + token, mask=inside, other=float("-inf"))
        key, weight = keys_of(x), weights_of(x, highest, heat)
        counts = inside & (key > above) & (weight.to(tl.float32) >= least)
        value = tl.where(counts, weight * 0 + 1 if COUNT else weight, 0)
        total += tl.sum(tl.where(key[None, :] >= bounds[:, None], value[None, :], 0), 1)
    return total


@triton.jit
def key_at(
    row, wanted, highest, heat, above, tied, least, vocab, BLOCK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """The highest key from which on at least `wanted` tokens (COUNT), or that much weight, are found, and how much
    there is above it. Tokens with the key `above` are together `tied`.
    """
    found = wanted * 0
    digit = tl.arange(0, 16).to(tl.int64)
    for i in range(0, 8):
        bounds = found + (digit << (28 - 4 * i))
        mass = mass_from(row, bounds, highest, heat, above, least, vocab, BLOCK, COUNT, 16)
        mass += tl.where(bounds <= above, tied, 0)
        found += (tl.sum((mass >= wanted).to(tl.int64), 0) - 1) << (28 - 4 * i)
    over = mass_from(row, found + 1 + tl.zeros([1], tl.int64), highest, heat, above, least, vocab, BLOCK, COUNT, 1)
    return found, tl.sum(over, 0) + tl.where(found < above, tied, 0)


@triton.jit
def share_of(uniform, total):
    """`floor(uniform * total)` without overflow, `uniform` a multiple of 2^-24."""
    times = tl.minimum((uniform * DRAWN).to(tl.int64), DRAWN - 1)
    return times * (total >> DRAWN_BITS) + ((times * (total % DRAWN)) >> DRAWN_BITS)


@triton.jit
def _sample(
    logits, temperature, top_k, top_p, min_p, uniform, out, vocab, stride,
    BLOCK: tl.constexpr, DRAW: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    highest, best, broken = float("-inf"), vocab * 0, 2147483647
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        broken = tl.minimum(broken, tl.min(tl.where(x != x, token, 2147483647), 0))
        x = tl.where(x != x, float("-inf"), x)
        here = tl.max(x, 0)
        first = tl.min(tl.where((x == here) & (token < vocab), token, 2147483647), 0)
        best = tl.where(here > highest, first, best)
        highest = tl.maximum(highest, here)
    best = tl.where(broken < vocab, broken, best)  # NaN counts as the largest
    tl.store(out + index, best.to(tl.int64))
    if DRAW:
        heat = tl.load(temperature + index)
        if (heat > 0) & (broken >= vocab) & (highest > float("-inf")) & (highest < float("inf")):
            drawn = tl.load(uniform + index)
            if CUT:
                chosen = _cut(
                    row, heat, highest, drawn, tl.load(top_k + index), tl.load(top_p + index), tl.load(min_p + index),
                    vocab, BLOCK,
                )  # fmt: skip
            else:
                chosen = _whole(row, heat, highest, drawn, vocab, BLOCK)
            tl.store(out + index, chosen)


@triton.jit
def _whole(row, heat, highest, drawn, vocab, BLOCK: tl.constexpr):
    """Without cuts, tokens stand in the order of their ids."""
    nothing = vocab.to(tl.int64) * 0
    bound = nothing + tl.zeros([1], tl.int64)
    total = tl.sum(mass_from(row, bound, highest, heat, nothing - 1, 0.0, vocab, BLOCK, False, 1), 0)
    share = share_of(drawn, total)
    chosen, before = nothing, nothing
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(row + token, mask=inside, other=float("-inf"))
        weight = tl.where(inside, weights_of(x, highest, heat), 0)
        upto = before + tl.cumsum(weight, 0)
        chosen += tl.sum((inside & (upto <= share)).to(tl.int64), 0)
        before += tl.sum(weight, 0)
    return tl.minimum(chosen, vocab - 1)


@triton.jit
def _cut(row, heat, highest, drawn, top_k, top_p, min_p, vocab, BLOCK: tl.constexpr):
    """With cuts, tokens stand by falling logit. What is left after each cut are the tokens above a key, `above`, and
    the first few of those that have it, which together weigh `tied`.
    """
    nothing = vocab.to(tl.int64) * 0
    above, tied = nothing - 1, nothing
    if (top_k > 0) & (top_k < vocab):
        above, count = key_at(row, top_k, highest, heat, nothing - 1, nothing, 0.0, vocab, BLOCK, True)
        tied = (top_k - count) * weights_of(logit_of(above), highest, heat)
    bound = nothing + tl.zeros([1], tl.int64)
    total = tied + tl.sum(mass_from(row, bound, highest, heat, above, 0.0, vocab, BLOCK, False, 1), 0)
    if top_p < 1:
        reach = tl.minimum(tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1), total)
        key, over = key_at(row, reach, highest, heat, above, tied, 0.0, vocab, BLOCK, False)
        weight = weights_of(logit_of(key), highest, heat)
        above, tied = key, (reach - over + weight - 1) // weight * weight
    least = tl.minimum(min_p, 1.0) * ONE
    if above >= 0:
        tied = tl.where(weights_of(logit_of(above), highest, heat).to(tl.float32) >= least, tied, 0)
    total = tied + tl.sum(mass_from(row, bound, highest, heat, above, least, vocab, BLOCK, False, 1), 0)
    share = share_of(drawn, total)
    key, over = key_at(row, share + 1, highest, heat, above, tied, least, vocab, BLOCK, False)
    place = (share - over) // weights_of(logit_of(key), highest, heat)
    chosen, seen = nothing, nothing
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(row + token, mask=inside, other=float("-inf"))
        same = (inside & (keys_of(x) == key)).to(tl.int64)
        upto = seen + tl.cumsum(same, 0)
        chosen += tl.sum(tl.where((same > 0) & (upto == place + 1), token.to(tl.int64), 0), 0)
        seen += tl.sum(same, 0)
    return chosen


def sample(
    p: Any,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """One program a row; as many passes over it as the step's rows ask for."""
    logits = logits if logits.stride(-1) == 1 and logits.dtype == torch.float32 else logits.float().contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    cut = top_k is not None and top_p is not None and min_p is not None
    if rows:
        _sample[(rows,)](
            logits, temperature, top_k if cut else out, top_p if cut else temperature, min_p if cut else temperature,
            temperature if uniform is None else uniform, out, vocab, logits.stride(0),
            BLOCK=min(512, max(128, triton.next_power_of_2(vocab))), DRAW=uniform is not None, CUT=cut, num_warps=8,
        )  # fmt: skip
    return out
