"""The gated delta rule and the causal convolution, as their pages describe them.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu; where the docstrings in torch-npu 2.13.0 are
narrower (heads of 128, whole 128s of channels), they hold. The order of states beside tokens is that of op-plugin's
tests.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip

IMPLEMENTATIONS = emulates = Implementations()
BF16 = torch.bfloat16


def _check_rows(query, key, value, beta, g) -> tuple[int, int, int, int]:
    """Query and key `[T, Nk, Dk]`, value `[T, Nv, Dv]`, beta and g `[T, Nv]`; returns Nk, Nv, Dk and Dv."""
    for name, tensor in (("query", query), ("key", key), ("value", value), ("beta", beta)):
        require(tensor is not None, f"{name} is given")
        chip.dtype(name, tensor, BF16)
    chip.contiguous(query=query, key=key, value=value, beta=beta, g=g)
    (tokens, groups, dim), (_, heads, width) = query.shape, value.shape
    chip.shape("key", key, tokens, groups, dim)
    chip.shape("value", value, tokens, heads, width)
    chip.shape("beta", beta, tokens, heads)
    require(heads % groups == 0, f"{heads} heads of values on {groups} of keys")
    if g is not None:
        require(g.dtype is torch.float32, f"g is float32, got {g.dtype}")
        chip.shape("g", g, tokens, heads)
    return groups, heads, dim, width


def _advance(state, q, k, v, beta, decay, scale):
    """One token: state `[N, Dv, Dk]`, q and k `[N, Dk]`, v `[N, Dv]`, beta and decay `[N]`, all in float32."""
    state = state * decay.exp()[:, None, None]
    missing = (v - torch.einsum("nvk,nk->nv", state, k)) * beta[:, None]
    state = state + missing[..., None] * k[:, None]
    return torch.einsum("nvk,nk->nv", state, q) * scale, state


def _inputs(query, key, value, beta, g):
    """All in float32, those of keys for every head of values."""
    shared = value.shape[1] // query.shape[1]
    q, k = (t.float().repeat_interleave(shared, 1) for t in (query, key))
    return q, k, value.float(), beta.float(), torch.zeros_like(beta, dtype=torch.float32) if g is None else g


@emulates("npu::npu_recurrent_gated_delta_rule")
def recurrent_gated_delta_rule(
    query, key, value, state, beta, scale, actual_seq_lengths, ssm_state_indices, num_accepted_tokens, g, gk
):
    """At most 8 tokens a sequence. Its state before them is that of its first token; each token's is stored."""
    chip.runs_on("npu_recurrent_gated_delta_rule", "910b", "910_93")
    chip.unused(num_accepted_tokens=num_accepted_tokens, gk=gk)
    groups, heads, dim, width = _check_rows(query, key, value, beta, g)
    require(max(groups, heads) <= 256 and max(dim, width) <= 512, "at most 256 heads of 512 entries")
    require(scale is not None, "scale is given")
    chip.dtype("state", state, BF16)
    chip.contiguous(state=state)
    chip.shape("state", state, None, heads, width, dim)
    require(state.shape[0] >= value.shape[0], f"{value.shape[0]} tokens and {state.shape[0]} states")
    for name, tensor in (("actual_seq_lengths", actual_seq_lengths), ("ssm_state_indices", ssm_state_indices)):
        require(tensor is not None and tensor.dtype is torch.int32, f"{name} is an int32 tensor")
    chip.shape("ssm_state_indices", ssm_state_indices, value.shape[0])
    lengths, places = actual_seq_lengths.tolist(), ssm_state_indices.tolist()
    require(all(1 <= n <= 8 for n in lengths), f"1 to 8 tokens a sequence, got {lengths}")
    require(sum(lengths) == value.shape[0], f"the lengths add up to {value.shape[0]} tokens, got {lengths}")
    require(all(0 <= p < state.shape[0] for p in places), f"places of states lie in [0, {state.shape[0]})")
    rows, out, first = _inputs(query, key, value, beta, g), torch.empty_like(value), 0
    for n in lengths:
        s = state[places[first]].float()
        for t in range(first, first + n):
            y, s = _advance(s, *(r[t] for r in rows), scale)
            out[t], state[places[t]] = y.to(out.dtype), s.to(state.dtype)
        first += n
    return out


@emulates("npu::npu_chunk_gated_delta_rule")
def chunk_gated_delta_rule(query, key, value, beta, initial_state, actual_seq_lengths, scale, g):
    """Any number of tokens a sequence; the bounds of what it is given are its page's, against overflow."""
    chip.runs_on("npu_chunk_gated_delta_rule", *chip.A2_A3)
    groups, heads, dim, width = _check_rows(query, key, value, beta, g)
    require(groups <= 64 and heads <= 64, f"at most 64 heads, got {groups} and {heads}")
    require(dim == width == 128, f"heads of 128 entries, got {dim} and {width}")
    require(initial_state is not None and actual_seq_lengths is not None, "states and lengths are given")
    chip.dtype("initial_state", initial_state, *((BF16, torch.float32) if chip.ARCH == "950" else (BF16,)))
    chip.contiguous(initial_state=initial_state)
    require(actual_seq_lengths.dtype is torch.int32, f"lengths are int32, got {actual_seq_lengths.dtype}")
    lengths = actual_seq_lengths.tolist()
    require(sum(lengths) == value.shape[0], f"the lengths add up to {value.shape[0]} tokens, got {lengths}")
    chip.shape("initial_state", initial_state, len(lengths), heads, width, dim)
    longest = max(t.float().square().sum(-1).max().item() for t in (query, key))
    require(longest < 1.05, f"queries and keys are divided by their lengths, got a length of {longest**0.5:.3f}")
    require(g is None or bool(((g >= -1) & (g <= 0)).all()), "g lies in [-1, 0]")
    require(bool(((beta > 0) & (beta < 1)).all()), "beta lies between 0 and 1")
    rows, out, after, first = _inputs(query, key, value, beta, g), torch.empty_like(value), [], 0
    for s, n in zip(initial_state.float(), lengths):
        for t in range(first, first + n):
            y, s = _advance(s, *(r[t] for r in rows), 1.0 if scale is None else scale)
            out[t] = y.to(out.dtype)
        after.append(s)
        first += n
    return out, torch.stack(after).to(initial_state.dtype)


@emulates("npu::npu_fused_causal_conv1d")
def fused_causal_conv1d(**call):
    """A new result; the states are changed."""
    return _convolve(**call)


@emulates("npu::npu_fused_causal_conv1d_v2")
def fused_causal_conv1d_v2(x, **call):
    """The result takes the place of the input, which is contiguous: no page, so nothing else is assumed."""
    chip.contiguous(x=x)
    x.copy_(_convolve(x, **call))


def _convolve(
    x, weight, conv_states, query_start_loc, cache_indices, initial_state_mode, bias, num_accepted_tokens, activation,
    pad_slot_id, run_mode, residual_connection, max_query_len, num_computed_tokens, block_idx_first_scheduled_token,
    block_idx_last_scheduled_token, initial_state_idx, block_size, conv_mode,
):  # fmt: skip
    """A kernel of 3 over ragged sequences; the last rows of its inputs become the last rows of its state."""
    chip.runs_on("npu_fused_causal_conv1d", "950")
    chip.unused(initial_state_mode=initial_state_mode, bias=bias, num_accepted_tokens=num_accepted_tokens)
    chip.unused(run_mode=run_mode, residual_connection=residual_connection, initial_state_idx=initial_state_idx)
    chip.unused(first=block_idx_first_scheduled_token, last=block_idx_last_scheduled_token)
    require(activation == "None" and conv_mode == "default" and block_size >= 2, "activation and mode are not emulated")
    chip.dtype("x", x, *chip.HALF)
    chip.same_dtype("x, weight and conv_states", x, weight, conv_states)
    chip.contiguous(weight=weight, query_start_loc=query_start_loc, cache_indices=cache_indices)
    (tokens, channels), size = x.shape, 3
    require(channels % 128 == 0 and channels <= 16384, f"channels in whole 128s up to 16384, got {channels}")
    chip.shape("weight", weight, size, channels)
    chip.shape("conv_states", conv_states, None, None, channels)
    for tensor in (query_start_loc, cache_indices, num_computed_tokens):
        require(tensor is not None and tensor.dtype is torch.int32, "starts, places and counts are int32 tensors")
    starts, places, done = query_start_loc.tolist(), cache_indices.tolist(), num_computed_tokens.tolist()
    batch, stored = len(starts) - 1, conv_states.shape[1]
    require(1 <= batch <= 256 and len(places) == len(done) == batch, f"1 to 256 sequences, got {batch}")
    require(starts[0] == 0 and starts[-1] == tokens and starts == sorted(starts), f"starts {starts} of {tokens} rows")
    lengths = [b - a for a, b in pairwise(starts)]
    require(max_query_len == max(lengths), f"the longest query has {max(lengths)} tokens, got {max_query_len}")
    if max_query_len <= 8:
        require(min(lengths) >= 1, f"1 to 8 tokens a sequence, got {lengths}")
        require(stored > max_query_len + 1, f"states of more than {max_query_len + 1} rows, got {stored}")
    else:
        require(stored >= size - 1, f"states of at least {size - 1} rows, got {stored}")
    used = [p for p in places if p != pad_slot_id]
    require(len(set(used)) == len(used) and all(0 <= p < len(conv_states) for p in used), f"places {places} differ")
    out = torch.full_like(x, torch.nan)
    for a, b, place, count in zip(starts, starts[1:], places, done):
        if place == pad_slot_id:
            continue
        before = torch.zeros(size - 1, channels, dtype=x.dtype) if count == 0 else conv_states[place]
        rows = torch.cat((before, x[a:b]))
        kept = min(stored, len(rows))
        conv_states[place, stored - kept :] = rows[len(rows) - kept :].clone()
        rows = rows[len(before) - size + 1 :].float()
        out[a:b] = sum(rows[i : i + b - a] * weight[i].float() for i in range(size)).to(x.dtype)
    return out
