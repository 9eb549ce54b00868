"""Sampling: temperature, top-k, top-p and min-p without sorting, one program per row of logits.

A token's weight is its probability as an integer, as in the op `sample`, so sums are exact and a row's token is a
function of that row alone. What the op finds in a sorted row is found here by a search over the logits' bits, four at a
time: the k-th largest logit, the one at which top-p is reached, the one at which the random number falls. Tokens with
equal logits are ordered by id; of those at a threshold only the first few count, whose weight is called `tied`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.ops.sampling import UNIFORM_BITS, WEIGHT_BITS

ONE = tl.constexpr(float(2**WEIGHT_BITS))
UNIFORM_STEP_BITS = tl.constexpr(UNIFORM_BITS)
UNIFORM_STEPS = tl.constexpr(2**UNIFORM_BITS)
LOWEST = tl.constexpr(-2147483648)


@triton.jit
def sort_keys(x):
    """Integers from 0 to 2^32 - 1 (int64) in the same order as the float32 numbers `x`; both zeros get the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) - LOWEST


@triton.jit
def logit_of_key(key):
    """The float32 number whose `sort_keys` is `key`."""
    bits = (key + LOWEST).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_weights(x, highest, heat):
    """Weights of logits `x` at temperature `heat`, int64: `exp((x - highest) / heat)` times 2^40."""
    return (tl.exp(tl.div_rn(x - highest, heat)) * ONE).to(tl.int64)


@triton.jit
def mass_at_or_above(
    row, bounds, highest, heat, above, min_weight, vocab, BLOCK: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """For each of N keys `bounds` (`sort_keys` of logits): the number of tokens (COUNT), or their weight, with that key
    or a higher one, int64 `[N]`. One pass over the row.

    Only tokens with a key above `above` and a weight of at least `min_weight` count. `highest` is the row's largest
    logit, `heat` its temperature.
    """
    total = tl.zeros([N], tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(row + token, mask=inside, other=float("-inf"))
        key, weight = sort_keys(x), token_weights(x, highest, heat)
        counts = inside & (key > above) & (weight.to(tl.float32) >= min_weight)
        value = tl.where(counts, weight * 0 + 1 if COUNT else weight, 0)
        total += tl.sum(tl.where(key[None, :] >= bounds[:, None], value[None, :], 0), 1)
    return total


@triton.jit
def find_key(
    row, target, highest, heat, above, tied, min_weight, vocab, BLOCK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """The highest key at or above which lie at least `target` tokens (COUNT), or that much weight; and how much lies
    above that key. Nine passes over the row.

    Of the tokens with the key `above`, those that count weigh `tied` together; lower keys do not count.
    """
    found = target * 0
    digit = tl.arange(0, 16).to(tl.int64)
    for i in range(0, 8):
        bounds = found + (digit << (28 - 4 * i))
        mass = mass_at_or_above(row, bounds, highest, heat, above, min_weight, vocab, BLOCK, COUNT, 16)
        mass += tl.where(bounds <= above, tied, 0)
        found += (tl.sum((mass >= target).to(tl.int64), 0) - 1) << (28 - 4 * i)
    bound = found + 1 + tl.zeros([1], tl.int64)
    over = mass_at_or_above(row, bound, highest, heat, above, min_weight, vocab, BLOCK, COUNT, 1)
    return found, tl.sum(over, 0) + tl.where(found < above, tied, 0)


@triton.jit
def draw_share(uniform, total):
    """The weight at which a random number falls, `floor(uniform * total)`, int64 and exact; `uniform` in [0, 1) is a
    multiple of 2^-24.
    """
    times = tl.minimum((uniform * UNIFORM_STEPS).to(tl.int64), UNIFORM_STEPS - 1)
    return times * (total >> UNIFORM_STEP_BITS) + ((times * (total % UNIFORM_STEPS)) >> UNIFORM_STEP_BITS)


@triton.jit
def _sample(
    logits, temperature, top_k, top_p, min_p, uniform, out, vocab, stride,
    BLOCK: tl.constexpr, DRAW: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """Program `row` stores the row's token in `out`: the largest logit's, which a NaN counts as; with DRAW, where the
    temperature is above 0, a random token; with FILTER, one that top-k, top-p and min-p leave.
    """
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    highest, best, first_nan = float("-inf"), vocab * 0, 2147483647
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        first_nan = tl.minimum(first_nan, tl.min(tl.where(x != x, token, 2147483647), 0))
        x = tl.where(x != x, float("-inf"), x)
        here = tl.max(x, 0)
        first = tl.min(tl.where((x == here) & (token < vocab), token, 2147483647), 0)
        best = tl.where(here > highest, first, best)
        highest = tl.maximum(highest, here)
    best = tl.where(first_nan < vocab, first_nan, best)  # NaN counts as the largest
    tl.store(out + index, best.to(tl.int64))
    if DRAW:
        heat = tl.load(temperature + index)
        if (heat > 0) & (first_nan >= vocab) & (highest > float("-inf")) & (highest < float("inf")):
            drawn = tl.load(uniform + index)
            if FILTER:
                chosen = _draw_filtered(
                    row, heat, highest, drawn, tl.load(top_k + index), tl.load(top_p + index), tl.load(min_p + index),
                    vocab, BLOCK,
                )  # fmt: skip
            else:
                chosen = _draw_from_all(row, heat, highest, drawn, vocab, BLOCK)
            tl.store(out + index, chosen)


@triton.jit
def _draw_from_all(row, heat, highest, drawn, vocab, BLOCK: tl.constexpr):
    """Draw from all tokens in the order of their ids: the one at which the sum of weights passes the random share."""
    zero = vocab.to(tl.int64) * 0
    bound = zero + tl.zeros([1], tl.int64)
    total = tl.sum(mass_at_or_above(row, bound, highest, heat, zero - 1, 0.0, vocab, BLOCK, False, 1), 0)
    share = draw_share(drawn, total)
    chosen, before = zero, zero
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(row + token, mask=inside, other=float("-inf"))
        weight = tl.where(inside, token_weights(x, highest, heat), 0)
        upto = before + tl.cumsum(weight, 0)
        chosen += tl.sum((inside & (upto <= share)).to(tl.int64), 0)
        before += tl.sum(weight, 0)
    return tl.minimum(chosen, vocab - 1)


@triton.jit
def _draw_filtered(row, heat, highest, drawn, top_k, top_p, min_p, vocab, BLOCK: tl.constexpr):
    """Draw from the tokens that top-k, top-p and min-p leave, by falling logit.

    What each filter leaves are the tokens with a key above `above`, and the first few of those that have that key,
    which weigh `tied` together.
    """
    zero = vocab.to(tl.int64) * 0
    above, tied = zero - 1, zero
    if (top_k > 0) & (top_k < vocab):
        above, count = find_key(row, top_k, highest, heat, zero - 1, zero, 0.0, vocab, BLOCK, True)
        tied = (top_k - count) * token_weights(logit_of_key(above), highest, heat)
    bound = zero + tl.zeros([1], tl.int64)
    total = tied + tl.sum(mass_at_or_above(row, bound, highest, heat, above, 0.0, vocab, BLOCK, False, 1), 0)
    if top_p < 1:
        reach = tl.minimum(tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1), total)
        key, over = find_key(row, reach, highest, heat, above, tied, 0.0, vocab, BLOCK, False)
        weight = token_weights(logit_of_key(key), highest, heat)
        above, tied = key, (reach - over + weight - 1) // weight * weight
    min_weight = tl.minimum(min_p, 1.0) * ONE
    if above >= 0:
        tied = tl.where(token_weights(logit_of_key(above), highest, heat).to(tl.float32) >= min_weight, tied, 0)
    total = tied + tl.sum(mass_at_or_above(row, bound, highest, heat, above, min_weight, vocab, BLOCK, False, 1), 0)
    share = draw_share(drawn, total)
    key, over = find_key(row, share + 1, highest, heat, above, tied, min_weight, vocab, BLOCK, False)
    place = (share - over) // token_weights(logit_of_key(key), highest, heat)
    chosen, seen = zero, zero
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(row + token, mask=inside, other=float("-inf"))
        same = (inside & (sort_keys(x) == key)).to(tl.int64)
        upto = seen + tl.cumsum(same, 0)
        chosen += tl.sum(tl.where((same > 0) & (upto == place + 1), token.to(tl.int64), 0), 0)
        seen += tl.sum(same, 0)
    return chosen


def sample(
    view: Any,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """The op `sample` by one launch: one program per row, with as many passes over the row as the step's parameters
    need.
    """
    logits = logits if logits.stride(-1) == 1 and logits.dtype == torch.float32 else logits.float().contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    has_filters = top_k is not None and top_p is not None and min_p is not None
    if rows:
        _sample[(rows,)](
            logits, temperature, top_k if has_filters else out, top_p if has_filters else temperature,
            min_p if has_filters else temperature,
            temperature if uniform is None else uniform, out, vocab, logits.stride(0),
            BLOCK=min(512, max(128, triton.next_power_of_2(vocab))), DRAW=uniform is not None,
            FILTER=has_filters, num_warps=8,
        )  # fmt: skip
    return out
