// Latent attention over chosen tokens: the entries that each query chose are gathered, as they are stored, into a cache
// of its own, over which latent attention runs as over any other. `sparse_mla_entry` is `ip_sparse_mla` of
// inferplane_cpu.h.
#pragma once
#include "model/mla.h"

namespace {

constexpr int64_t kSparseTokens = 8;  // query tokens whose entries are gathered at a time

// A cache with `width` blocks for each of `tokens` sequences, which have one query token each.
struct GatheredCache {
  ip_cache cache;
  ip_batch batch;
  int32_t *start, *lens, *tables;
  int64_t width;
};

// A gathered cache for `tokens` tokens of at most `top` entries each, in workspaces of the calling thread.
inline GatheredCache reserve_gathered(const ip_cache &from, int64_t tokens, int64_t top, int64_t dim) {
  const KvEntries k = key_entries(from, dim);
  const int64_t width = (top + from.block - 1) / from.block, slots = tokens * width * from.block;
  GatheredCache to = {from, {}, nullptr, nullptr, nullptr, width};
  to.cache.k = to.cache.v = workspace(kGatheredEntries)->reserve<char>(slots * k.bytes_of(dim));
  to.cache.k_stride = to.cache.v_stride = dim;
  if (k.has_scales())
    to.cache.k_scale = to.cache.v_scale = workspace(kGatheredScales)->reserve<float>(slots * k.groups);
  to.start = workspace(kGatheredTables)->reserve<int32_t>(2 * tokens + 1 + tokens * width);
  to.lens = to.start + tokens + 1, to.tables = to.lens + tokens;
  to.batch = {to.start, to.lens, to.tables, tokens, width};
  return to;
}

// Copies the entries of block `b` of the token with number `i` in `to`: those at `chosen` in the sequence with this
// block table. Slots behind the last entry become zeros.
inline void gather_block(const KvEntries &from, int64_t dim, int64_t block, const int32_t *table, const int32_t *chosen,
                         const GatheredCache &to, int64_t i, int64_t b) {
  const int64_t bytes = from.bytes_of(dim), first = (i * to.width + b) * block;
  for (int64_t j = 0; j < block; j++) {
    char *entry = (char *)to.cache.k + (first + j) * bytes;
    float *scale = from.has_scales() ? to.cache.k_scale + (first + j) * from.groups : nullptr;
    if (b * block + j >= to.lens[i]) {
      memset(entry, 0, (size_t)bytes);
      for (int64_t g = 0; scale && g < from.groups; g++) scale[g] = 0;
      continue;
    }
    const int64_t position = chosen[b * block + j], slot = (int64_t)table[position / block] * block + position % block;
    memcpy(entry, (const char *)from.data + slot * from.bytes_of(from.stride), (size_t)bytes);
    if (scale) memcpy(scale, from.scale + slot * from.groups, (size_t)from.groups * sizeof(float));
  }
}

// `ip_sparse_mla`, kSparseTokens tokens at a time; padded rows become zeros.
void sparse_mla_entry(const bf16 *q_nope, const int64_t *nope_strides, const bf16 *q_rope, const int64_t *rope_strides,
                      const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope,
                      int64_t rope, int64_t value, int64_t latent, float scale, const int32_t *chosen, int64_t top,
                      bf16 *out) {
  const int64_t tokens = batch->start[batch->sequences], dim = latent + rope;
  const KvEntries from = key_entries(*cache, dim);
  const int32_t *tables[kSparseTokens];
  for (int64_t first = 0, sequence = 0; first < tokens; first += kSparseTokens) {
    const int64_t n = min64(kSparseTokens, tokens - first);
    GatheredCache to = reserve_gathered(*cache, n, top, dim);
    for (int64_t i = 0; i < n; i++) {
      while (batch->start[sequence + 1] <= first + i) sequence++;
      tables[i] = batch->tables + sequence * batch->table_width;
      const int32_t *row = chosen + (first + i) * top;
      int32_t count = 0;
      while (batch->lens[sequence] && count < top && row[count] >= 0) count++;
      to.start[i] = (int32_t)i, to.lens[i] = count;
      for (int64_t b = 0; b < to.width; b++) to.tables[i * to.width + b] = (int32_t)(i * to.width + b);
    }
    to.start[n] = (int32_t)n;
    bf16 *folded = workspace(kFoldedQueries)->reserve<bf16>(n * heads * dim),
         *mixed = workspace(kMixedLatents)->reserve<bf16>(n * heads * latent);
    const MlaArgs m = {q_nope + first * nope_strides[0], q_rope + first * rope_strides[0], nope_strides[0],
                       nope_strides[1], rope_strides[0], rope_strides[1], *kv_b, heads, nope, rope, value, latent, n,
                       folded, mixed, out + first * heads * value};
    const AttentionArgs args = attention_args(to.cache, folded, heads, 1, dim, latent, 0, scale, mixed);
    const int64_t work = n * heads * (top * dim / 4 + latent * (nope + value) / 4);
    AttentionPlan plan = plan_attention(args, to.batch, work < 16384 ? 1 : team_size(), workspace(kAttentionTasks));
    memset(mixed, 0, (size_t)(n * heads * latent) * sizeof(bf16));  // attention skips padded rows
    run_on_team(work, [&](Team &team) {
      team.for_each_chunk(n * to.width, 4, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; u++) {
          const int64_t i = u / to.width, b = u % to.width;
          if (b * cache->block < to.lens[i])
            gather_block(from, dim, cache->block, tables[i], chosen + (first + i) * top, to, i, b);
        }
      });
      team.barrier();
      mla(team, m, args, plan);
    });
  }
}

}  // namespace
