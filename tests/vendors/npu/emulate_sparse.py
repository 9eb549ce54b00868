"""Sparse attention, as its pages describe it: indexers, attention to chosen tokens, what stands before both, and writes
of rows.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu. Where they are silent, the vendor's tests there
decide (test/test_custom_ops): which of equal scores wins (a stable sort), what stands behind the positions that a query
sees (those that it does not see, and -1 beside int8), and the 16-bit steps between the integers' products and a score.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip
from tests.vendors.npu.emulate_basic import deinterleave, norm
from tests.vendors.npu.emulate_cache import tokens_of

IMPLEMENTATIONS = emulates = Implementations()
FOREVER = 9223372036854775807
LARGE_COUNTS = range(3072, 8193, 1024)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def _check_lengths(query, count_query, count_key, block_table, layouts, sparse_mode, tokens) -> None:
    require(layouts == ("TND", "PA_BSND"), f"layouts {layouts} are not emulated")
    require(sparse_mode == 3, f"sparse_mode {sparse_mode} is not emulated")
    require(tokens == (FOREVER, FOREVER), "pre_tokens and next_tokens have their defaults")
    for name, tensor in (("lengths of queries", count_query), ("lengths of keys", count_key)):
        require(tensor is not None, f"TND and PA_BSND need {name}")
        require(tensor.dtype is torch.int32 and tensor.dim() == 1, f"{name} are int32 [B]")
    chip.contiguous(block_table=block_table)
    require(block_table is not None and block_table.dim() == 2, "PA_BSND needs a block_table of two dimensions")
    require(block_table.dtype is torch.int32, "block_table is int32")
    sequences = count_query.shape[0]
    require(count_key.shape[0] == block_table.shape[0] == sequences, f"lengths and tables of {sequences} sequences")
    ends = count_query.tolist()
    require(ends == sorted(ends), f"lengths of queries are cumulative, got {ends}")
    require(ends[-1] == query.shape[0], f"the last length of queries is {query.shape[0]} rows, got {ends[-1]}")


def _check_blocks(name, cache, block_table, count_key) -> None:
    size = cache.shape[1]
    require(0 < size <= 1024 and size % 16 == 0, f"{name}: blocks of a multiple of 16 tokens up to 1024, got {size}")
    for table, count in zip(block_table, count_key.tolist()):
        require(0 <= count <= table.shape[0] * size, f"{count} tokens in a table of {table.shape[0]} blocks")
        named = table[: -(-count // size)].tolist()
        require(all(0 <= block < cache.shape[0] for block in named), f"{name}: blocks outside of the cache")


def _sequences(count_query, count_key) -> Iterator[tuple[int, int, int, int]]:
    """Number, first and last row, and length of each sequence."""
    for i, ((a, b), count) in enumerate(zip(pairwise([0, *count_query.tolist()]), count_key.tolist())):
        yield i, a, b, count


def _take_largest(scores, count, behind) -> torch.Tensor:
    """Rows of positions by falling score, of equal ones the lower first; query i of S sees those up to `len - S + i`.
    `behind`: whether those that it does not see follow, else -1."""
    queries, keys = scores.shape
    out = torch.full((queries, count), -1, dtype=torch.int32)
    for i in range(queries):
        seen = max(0, keys - queries + i + 1)
        order = scores[i, :seen].sort(descending=True, stable=True).indices.tolist()
        order += range(seen, keys) if behind else ()
        out[i, : len(order[:count])] = torch.tensor(order[:count], dtype=torch.int32)
    return out


def _check_indexer(query, key, weights, count, heads_of_950) -> None:
    chip.contiguous(query=query, key=key, weights=weights)
    chip.shape("query", query, None, None, 128)
    chip.shape("key", key, None, None, 1, 128)
    chip.shape("weights", weights, *query.shape[:2])
    heads = query.shape[1]
    require(1 <= heads <= 64, f"at most 64 heads, got {heads}")
    require(chip.ARCH != "950" or heads in heads_of_950, f"the 950 takes {heads_of_950} heads, got {heads}")
    require(1 <= count <= 2048 or count in LARGE_COUNTS, f"sparse_count {count}")


@emulates("npu::npu_lightning_indexer")
def lightning_indexer(
    query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query, layout_key,
    sparse_count, sparse_mode, pre_tokens, next_tokens, return_value,
):  # fmt: skip
    """The count of largest sums over heads of a weight times the positive part of a product."""
    chip.runs_on("npu_lightning_indexer", *chip.A2_A3)
    chip.unused(return_value=return_value)
    chip.dtype("query", query, *chip.HALF)
    chip.same_dtype("query and key", query, key)
    wide = weights.dtype is torch.float32 and chip.ARCH != "950"
    require(wide or weights.dtype is query.dtype, f"weights in {weights.dtype} on {chip.ARCH}")
    _check_indexer(query, key, weights, sparse_count, (8, 16, 24, 32, 64))
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    _check_lengths(query, *lengths, block_table, (layout_query, layout_key), sparse_mode, (pre_tokens, next_tokens))
    _check_blocks("key", key, block_table, actual_seq_lengths_key)
    found = torch.empty(query.shape[0], 1, sparse_count, dtype=torch.int32)
    for i, a, b, count in _sequences(*lengths):
        keys = tokens_of(key.flatten(2), block_table[i], count).float()
        products = (query[a:b].float() @ keys.T).clamp(min=0)
        scores = (products * weights[a:b].float()[..., None]).sum(1)
        found[a:b, 0] = _take_largest(scores, sparse_count, behind=True)
    return found, query.new_empty(0)


@emulates("npu::npu_quant_lightning_indexer")
def quant_lightning_indexer(
    query, key, weights, query_dequant_scale, key_dequant_scale, query_quant_mode, key_quant_mode,
    actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query, layout_key, sparse_count, sparse_mode,
    pre_tokens, next_tokens, query_dtype, key_dtype,
):  # fmt: skip
    """The same of integers with a scale a token and head. Products over 1024, and weights times scales of queries, are
    in float16."""
    chip.runs_on("npu_quant_lightning_indexer", *chip.A2_A3)
    chip.unused(query_quant_mode=query_quant_mode, key_quant_mode=key_quant_mode)
    chip.unused(query_dtype=query_dtype, key_dtype=key_dtype)
    require(query.dtype is key.dtype is torch.int8, f"int8 is emulated, got {query.dtype} and {key.dtype}")
    for name, tensor in (("weights", weights), ("scales of queries", query_dequant_scale), ("keys", key_dequant_scale)):
        require(tensor.dtype is torch.float16, f"beside int8 {name} are float16, got {tensor.dtype}")
    chip.contiguous(query_dequant_scale=query_dequant_scale, key_dequant_scale=key_dequant_scale)
    chip.shape("query_dequant_scale", query_dequant_scale, *query.shape[:2])
    chip.shape("key_dequant_scale", key_dequant_scale, *key.shape[:2], 1)
    _check_indexer(query, key, weights, sparse_count, (8, 16, 24, 32, 64))
    require(sparse_count <= 2048, f"sparse_count is at most 2048, got {sparse_count}")
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    _check_lengths(query, *lengths, block_table, (layout_query, layout_key), sparse_mode, (pre_tokens, next_tokens))
    _check_blocks("key", key, block_table, actual_seq_lengths_key)
    scaled = weights * query_dequant_scale
    require(bool(scaled.isfinite().all()), "weights times scales of queries lie in float16's range")
    found = torch.empty(query.shape[0], 1, sparse_count, dtype=torch.int32)
    for i, a, b, count in _sequences(*lengths):
        keys = tokens_of(key.flatten(2), block_table[i], count).float()
        products = ((query[a:b].float() @ keys.T).clamp(min=0) / 1024).half().float()
        scores = (products * scaled[a:b].float()[..., None]).sum(1)
        scores = scores * tokens_of(key_dequant_scale, block_table[i], count).float().T
        found[a:b, 0] = _take_largest(scores, sparse_count, behind=False)
    return found


def _attend(query, key, value, indices, scale, lengths) -> torch.Tensor:
    """Attention of each row to the tokens it names until the first -1, and of these to those it may see.

    Args:
        query: float32 `[T, N, D]`. key, value: float32 `[n, D]` of a sequence, in a list.
        lengths: of queries, cumulative, and of keys.
    """
    out = query.new_full(
        (*query.shape[:2], value[0].shape[-1]), torch.nan
    )  # of a row without any token nothing is said
    for i, a, b, count in _sequences(*lengths):
        for row in range(a, b):
            named = indices[row, 0].tolist()
            used = named[: named.index(-1)] if -1 in named else named
            require(set(named[len(used) :]) <= {-1}, f"row {row}: what is not valid stands behind what is")
            require(all(0 <= n < count for n in used), f"row {row}: positions outside of {count} tokens")
            taken = [n for n in used if n <= count - (b - a) + row - a]
            if taken:
                weights = (query[row] @ key[i][taken].T * scale).softmax(-1)
                out[row] = weights @ value[i][taken]
    return out


def _check_attention(query, indices, heads, width, lengths, table, layouts, sparse_mode, tokens, attention_mode):
    chip.dtype("query", query, *chip.HALF)
    chip.contiguous(query=query, sparse_indices=indices)
    chip.shape("query", query, None, None, width)
    require(query.shape[1] in heads, f"{query.shape[1]} heads on {chip.ARCH}")
    chip.shape("sparse_indices", indices, query.shape[0], 1, None)
    require(indices.dtype is torch.int32 and indices.shape[-1] > 0, "sparse_indices are int32, one at least a row")
    require(attention_mode == 2, f"attention_mode is 2, got {attention_mode}")
    _check_lengths(query, *lengths, table, layouts, sparse_mode, tokens)


@emulates("npu::npu_sparse_flash_attention")
def sparse_flash_attention(
    query, key, value, sparse_indices, scale_value, block_table, actual_seq_lengths_query, actual_seq_lengths_kv,
    query_rope, key_rope, sparse_block_size, layout_query, layout_kv, sparse_mode, pre_tokens, next_tokens,
    attention_mode, return_softmax_lse, sinks,
):  # fmt: skip
    """Latents of 512 as keys and values, rotated parts of 64 beside the keys."""
    chip.runs_on("npu_sparse_flash_attention", *chip.A2_A3)
    chip.unused(return_softmax_lse=return_softmax_lse, sinks=sinks)
    lengths, layouts = (actual_seq_lengths_query, actual_seq_lengths_kv), (layout_query, layout_kv)
    tokens = pre_tokens, next_tokens
    heads = range(1, 129) if chip.ARCH == "950" else HEADS
    _check_attention(
        query, sparse_indices, heads, 512, lengths, block_table, layouts, sparse_mode, tokens, attention_mode
    )
    require(sparse_block_size == 1, f"sparse_block_size {sparse_block_size} is not emulated")
    require(query_rope is not None and key_rope is not None, "mode 2 has rotated parts")
    chip.contiguous(query_rope=query_rope, key=key, value=value, key_rope=key_rope)
    chip.same_dtype("query, key, value and rotated parts", query, key, value, query_rope, key_rope)
    chip.shape("query_rope", query_rope, *query.shape[:2], 64)
    chip.shape("key", key, None, None, 1, 512)
    chip.shape("key_rope", key_rope, *key.shape[:3], 64)
    require(value.data_ptr() == key.data_ptr() and value.shape == key.shape, "key and value are one tensor")
    _check_blocks("key", key, block_table, actual_seq_lengths_kv)
    latents, keys = [], []
    for table, count in zip(block_table, actual_seq_lengths_kv.tolist()):
        latents.append(tokens_of(key.flatten(2), table, count).float())
        keys.append(torch.cat((latents[-1], tokens_of(key_rope.flatten(2), table, count).float()), -1))
    both = torch.cat((query, query_rope), -1).float()
    out = _attend(both, keys, latents, sparse_indices, scale_value, lengths)
    return out.to(query.dtype), torch.empty(0), torch.empty(0)


@emulates("npu::npu_kv_quant_sparse_flash_attention")
def kv_quant_sparse_flash_attention(
    query, key, value, sparse_indices, scale_value, key_quant_mode, value_quant_mode, key_dequant_scale,
    value_dequant_scale, block_table, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_block_size, layout_query,
    layout_kv, sparse_mode, pre_tokens, next_tokens, attention_mode, quant_scale_repo_mode, tile_size, rope_head_dim,
    key_dtype, value_dtype,
):  # fmt: skip
    """Rows of 512 integers, 64 numbers in the queries' dtype, and 4 float32 scales of 128 integers each."""
    chip.runs_on("npu_kv_quant_sparse_flash_attention", *chip.A2_A3)
    chip.unused(key_dequant_scale=key_dequant_scale, value_dequant_scale=value_dequant_scale)
    chip.unused(key_dtype=key_dtype, value_dtype=value_dtype)
    lengths, layouts = (actual_seq_lengths_query, actual_seq_lengths_kv), (layout_query, layout_kv)
    tokens = pre_tokens, next_tokens
    heads = (*HEADS, 48) if chip.ARCH == "950" else HEADS
    _check_attention(
        query, sparse_indices, heads, 576, lengths, block_table, layouts, sparse_mode, tokens, attention_mode
    )
    require(sparse_block_size == 1, f"sparse_block_size {sparse_block_size} is not emulated")
    modes = key_quant_mode, value_quant_mode, quant_scale_repo_mode
    require(modes == (2, 2, 1), f"a scale a tile, within the row: modes 2, 2 and 1, got {modes}")
    require((tile_size, rope_head_dim) == (128, 64), f"tiles of 128 and rotated parts of 64, got {tile_size}")
    require(key.dtype is value.dtype is torch.int8, f"int8 is emulated, got {key.dtype}")
    chip.contiguous(key=key, value=value)
    chip.shape("key", key, None, None, 1, 656)
    require(value.shape == key.shape, "key and value have one shape")
    _check_blocks("key", key, block_table, actual_seq_lengths_kv)
    latents, keys = [], []
    for table, count in zip(block_table, actual_seq_lengths_kv.tolist()):
        rows = tokens_of(key.flatten(2), table, count)
        scales = rows[:, 640:].contiguous().view(torch.float32).repeat_interleave(128, -1)
        latents.append(rows[:, :512].float() * scales)
        keys.append(torch.cat((latents[-1], rows[:, 512:640].contiguous().view(query.dtype).float()), -1))
    return _attend(query.float(), keys, latents, sparse_indices, scale_value, lengths).to(query.dtype)


@emulates("npu::npu_rotate_quant")
def rotate_quant(x, rotation, alpha, dst_dtype, axis, round_mode, scale_alg, dst_type_max, transpose_y):
    """Blocks of a row times a matrix, rounded to the row's dtype, then a scale a row; a row of zeros as
    npu_dynamic_quant has it."""
    chip.runs_on("npu_rotate_quant", "910b", "910_93")  # on the 950 into formats with shared exponents alone
    chip.unused(alpha=alpha, scale_alg=scale_alg, dst_type_max=dst_type_max, transpose_y=transpose_y)
    require(dst_dtype in (None, 1) and axis in (-1, 1) and round_mode == "rint", "int8 of the last axis is emulated")
    chip.dtype("x", x, *chip.HALF)
    chip.same_dtype("x and rotation", x, rotation)
    chip.shape("x", x, None, None)
    k, n = rotation.shape[0], x.shape[1]
    chip.shape("rotation", rotation, k, k)
    require(16 <= k <= 1024 and n % k == 0, f"16 to 1024 rows that divide {n}, got {k}")
    require(128 <= n <= 16000 and n % 8 == 0, f"128 to 16000 columns, a multiple of 8, got {n}")
    turned = (x.float().view(-1, n // k, k) @ rotation.float()).view(x.shape).to(x.dtype).float()
    scale = turned.abs().amax(-1) / 127.0
    data = (turned / scale[:, None]).round().nan_to_num(99.0)
    return data.clamp(-128, 127).to(torch.int8), scale


@emulates("npu::npu_scatter_nd_update_")
def scatter_nd_update(input, indices, updates):
    """Rows into the places that the indices name. vllm-ascend calls it on the 950 too, which its page does not list."""
    chip.runs_on("npu_scatter_nd_update_", *chip.A2_A3)
    allowed = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)
    require(input.dtype in allowed, f"input in {input.dtype}")
    chip.same_dtype("input and updates", input, updates)
    require(indices.dtype in (torch.int32, torch.int64), f"indices are int32 or int64, got {indices.dtype}")
    require(indices.dim() == 2 and indices.shape[1] == 1, f"indices [rows, 1] are emulated, got {list(indices.shape)}")
    chip.shape("updates", updates, indices.shape[0], *input.shape[1:])
    places = indices[:, 0].tolist()
    require(all(0 <= place < input.shape[0] for place in places), "indices within the input")
    require(len(set(places)) == len(places), "which of equal indices wins is not said")
    input[indices[:, 0]] = updates
    return input


HIDDEN_SIZES = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)


@emulates("npu::npu_mla_prolog_v3")
def mla_prolog_v3(
    token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin, rope_cos,
    kv_cache, kr_cache, cache_index, rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv, cache_mode, query_norm_flag, qc_qr_scale,
    kc_scale, tile_size, **others,
):  # fmt: skip
    """Of tokens [T, hidden size], without quantization: folded queries, their rotated parts with even entries first,
    and the normed query; latents and rotated keys are written."""
    chip.runs_on("npu_mla_prolog_v3", *chip.A2_A3)
    chip.unused(**others)
    require((cache_mode, query_norm_flag) == ("PA_BSND", True), f"cache_mode {cache_mode!r} is not emulated")
    require((qc_qr_scale, kc_scale, tile_size) == (1.0, 1.0, 128), "factors of queries and keys are not emulated")
    tensors = {
        "token_x": token_x, "weight_dq": weight_dq, "weight_uq_qr": weight_uq_qr, "weight_uk": weight_uk,
        "weight_dkv_kr": weight_dkv_kr, "rmsnorm_gamma_cq": rmsnorm_gamma_cq, "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv,
        "rope_sin": rope_sin, "rope_cos": rope_cos, "kv_cache": kv_cache, "kr_cache": kr_cache,
    }  # fmt: skip
    for name, tensor in tensors.items():
        require(tensor.dtype is torch.bfloat16, f"{name} is bfloat16, got {tensor.dtype}")
    chip.contiguous(**tensors, cache_index=cache_index)
    chip.in_nz(weight_dq=weight_dq, weight_uq_qr=weight_uq_qr, weight_dkv_kr=weight_dkv_kr)
    rows, hidden = token_x.shape
    require(hidden in HIDDEN_SIZES, f"a hidden size of {hidden}")
    heads, nope, _ = weight_uk.shape
    require(heads in HEADS and nope in (128, 192), f"{heads} heads of {nope}")
    rank = weight_dq.shape[1]
    require(rank in (1536, 2048), f"queries of rank 1536 or 2048, got {rank}")
    chip.shape("weight_dq", weight_dq, hidden, rank)
    chip.shape("weight_uq_qr", weight_uq_qr, rank, heads * (nope + 64))
    chip.shape("weight_uk", weight_uk, heads, nope, 512)
    chip.shape("weight_dkv_kr", weight_dkv_kr, hidden, 576)
    for name, tensor, width in (("cq", rmsnorm_gamma_cq, rank), ("ckv", rmsnorm_gamma_ckv, 512)):
        chip.shape(f"rmsnorm_gamma_{name}", tensor, width)
    chip.shape("rope_sin", rope_sin, rows, 64)
    chip.shape("rope_cos", rope_cos, rows, 64)
    chip.shape("kv_cache", kv_cache, None, None, 1, 512)
    chip.shape("kr_cache", kr_cache, *kv_cache.shape[:3], 64)
    chip.shape("cache_index", cache_index, rows)
    require(cache_index.dtype is torch.int64, f"cache_index is int64, got {cache_index.dtype}")
    places = cache_index.tolist()
    require(all(0 <= place < kv_cache.shape[0] * kv_cache.shape[1] for place in places), "cache_index in the cache")
    require(len(set(places)) == len(places), "which of equal indices wins is not said")
    dtype = token_x.dtype
    low = norm((token_x.float() @ weight_dq.float()).to(dtype), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)[0]
    q = (low.float() @ weight_uq_qr.float()).to(dtype).view(rows, heads, nope + 64)
    folded = torch.einsum("tnd,ndk->tnk", q[..., :nope].float(), weight_uk.float()).to(dtype)
    turned = deinterleave(q[..., nope:], rope_cos[:, None], rope_sin[:, None]).to(dtype)
    both = (token_x.float() @ weight_dkv_kr.float()).to(dtype)
    kv_cache.flatten(0, 2)[cache_index] = norm(both[:, :512], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0]
    kr_cache.flatten(0, 2)[cache_index] = deinterleave(both[:, 512:], rope_cos, rope_sin).to(dtype)
    return folded, turned, torch.empty(1), low, torch.empty(1)
