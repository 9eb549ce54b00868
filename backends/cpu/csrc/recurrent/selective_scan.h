// The selective scan of Mamba-2, token by token for any number of them: so a prompt gives the same bits however it is
// cut. Rows of a head's state stay in the first-level cache while a sequence's tokens pass.
#pragma once
#include "recurrent/sequences.h"

namespace {

// Inputs, results and states of a step. before and after: [rows, heads, dim, size]; y: [tokens, heads, dim]; dt: [tokens,
// heads], rows dt_row apart.
struct ScanArgs {
  ip_scan scan;
  ip_head_rows x, b, c;
  const bf16 *dt;
  int64_t dt_row;
  const float *before;
  float *after;
  bf16 *y;
};

constexpr int64_t kScanRows = 32;  // rows of a head's state that a thread takes at a time

// All tokens of a sequence for rows first .. first + n of a head's state, n at most kScanRows.
inline void scan_rows(const ScanArgs &args, const LiveRows &rows, int64_t h, int64_t first, int64_t n,
                      const float *before, float *after) {
  const ip_scan &scan = args.scan;
  int64_t size = scan.size, group = h / (scan.heads / scan.groups), wide = round_up(size, kLanes);
  float *b = workspace(kRecurrentInputs)->reserve<float>(2 * wide), *c = b + wide, results[kScanRows];
  memset(b, 0, (size_t)(2 * wide) * sizeof(float));
  const float *from = before;
  if (rows.begins) {
    memset(after, 0, (size_t)(n * size) * sizeof(float));
    from = after;
  }
  for (int64_t i = 0; i < rows.count; i++) {
    int64_t t = rows.begin + i;
    for_each_register(size, [&](int64_t j, int64_t m) __attribute__((always_inline)) {
      store_floats(b + j, load_floats(head_at(args.b, t, group) + j, m), m);
      store_floats(c + j, load_floats(head_at(args.c, t, group) + j, m), m);
    });
    float dt = softplus(bf16_to_float(args.dt[t * args.dt_row + h]) + scan.dt_bias[h]);
    dt = dt < scan.dt_min ? scan.dt_min : dt > scan.dt_max ? scan.dt_max : dt;
    float remains = __builtin_expf(-__builtin_expf(scan.a_log[h]) * dt);
    const bf16 *x = head_at(args.x, t, h) + first;
    for (int64_t p = 0; p < n; p++) {
      float input = bf16_to_float(x[p]);
      Floats sum = {}, added = splat_floats(input * dt);
      for_each_register(size, [&](int64_t j, int64_t m) __attribute__((always_inline)) {
        Floats s = fma(added, load<Floats>(b + j), remains * load_floats(from + p * size + j, m));
        store_floats(after + p * size + j, s, m);
        sum = fma(s, load<Floats>(c + j), sum);
      });
      results[p] = sum_lanes(sum) + input * scan.skip[h];
    }
    bf16 *y = args.y + (t * scan.heads + h) * scan.dim + first;
    for_each_register(n, [&](int64_t p, int64_t m) { store_floats(y + p, load_floats(results + p, m), m); });
    from = after;
  }
}

// y and the states after the step. Every thread of the team calls it; complete after the next `barrier`.
inline void selective_scan(Team &team, const ScanArgs &args, const ip_sequences &s) {
  int64_t heads = args.scan.heads, dim = args.scan.dim, size = args.scan.size;
  int64_t blocks = (dim + kScanRows - 1) / kScanRows;
  team.for_each_chunk(s.sequences * heads * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t sequence = i / (heads * blocks), h = i / blocks % heads, first = i % blocks * kScanRows;
      int64_t n = min64(kScanRows, dim - first);
      const float *before = args.before + ((row_before(s, sequence) * heads + h) * dim + first) * size;
      float *after = args.after + ((row_after(s, sequence) * heads + h) * dim + first) * size;
      LiveRows rows = live_rows(s, sequence);
      if (rows.count)
        scan_rows(args, rows, h, first, n, before, after);
      else if (before != after)
        memcpy(after, before, (size_t)(n * size) * sizeof(float));
    }
  });
}

}  // namespace
