// Calls every native function on every instruction set with buffers of exactly the size it may touch, in odd sizes, for
// a build with -fsanitize=address,undefined (`make sanitize`). Results are compared with plain loops where that is
// short; the conformance suite judges the rest.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "../csrc/inferplane_cpu.h"
#include "../csrc/runtime/oversubscription.h"

namespace {

uint64_t state = 1;
float drawn() {  // -1 .. 1
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)((double)(state >> 11) / 4503599627370496.0 - 1.0);
}
ip_bf16 narrow(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return (ip_bf16)((u + 0x8000) >> 16);
}
float widen(ip_bf16 b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// On the heap, so that the sanitizer guards both ends.
template <class T>
struct Array {
  std::unique_ptr<T[]> data;
  explicit Array(int64_t n) : data(new T[(size_t)n]()) {}
  operator T *() { return data.get(); }
};
struct Bf16 : Array<ip_bf16> {
  explicit Bf16(int64_t n) : Array(n) {
    for (int64_t i = 0; i < n; i++) data[i] = narrow(drawn());
  }
};

int failures = 0;
void expect(bool holds, const char *what) {
  if (!holds) {
    printf("WRONG on %s: %s\n", ip_current_isa(), what);
    failures++;
  }
}

struct Stored {  // a weight of any kind, with what keeps it
  ip_matrix m;
  std::vector<std::shared_ptr<void>> kept;
  std::vector<float> values;  // [n, k]
};

template <class T>
T *keep(Stored &s, int64_t n) {
  auto a = std::make_shared<Array<T>>(n);
  s.kept.push_back(a);
  return *a;
}

// Added to a kind: with minimums; with scales that are integers times units; what activations are rounded to.
constexpr int kMinimums = 64, kCoded = 128, kInput = 256;
constexpr int kInt8 = kInput * IP_INPUT_INT8, kInt4 = kInput * IP_INPUT_INT4, kMxfp4 = kInput * IP_INPUT_MXFP4;

Stored weight(int kind, int group, int64_t n, int64_t k) {
  Stored s = {};
  const bool least = kind & kMinimums, coded = kind & kCoded;
  const int input = kind / kInput;
  kind &= kMinimums - 1;
  s.m = {kind, group, n, k, k, nullptr, nullptr, nullptr, nullptr, nullptr};
  s.m.input = input;
  s.values.resize((size_t)(n * k));
  if (kind == IP_BF16 || kind == IP_BF16_REORDERABLE) {
    ip_bf16 *data = keep<ip_bf16>(s, n * k);
    for (int64_t i = 0; i < n * k; i++) s.values[(size_t)i] = widen(data[i] = narrow(drawn()));
    s.m.data = data;
  } else if (kind == IP_FP8) {
    uint8_t *data = keep<uint8_t>(s, n * k);
    int64_t blocks = (k + 127) / 128, rows = (n + group - 1) / group;
    float *scale = keep<float>(s, rows * blocks);
    for (int64_t i = 0; i < rows * blocks; i++) scale[i] = drawn();
    for (int64_t i = 0; i < n * k; i++) {
      int b = (int)(state >> 40) & 0xff;
      drawn();
      if ((b & 0x7f) == 0x7f) b = 3;
      int exponent = b >> 3 & 15, fraction = b & 7;
      float v = exponent ? ldexpf(1.0f + (float)fraction / 8, exponent - 7) : ldexpf((float)fraction / 8, -6);
      data[i] = (uint8_t)b;
      s.values[(size_t)i] = (b & 0x80 ? -v : v) * scale[i / k / group * blocks + i % k / 128];
    }
    s.m.data = data, s.m.scale = scale;
  } else {
    int top = kind == IP_INT4 ? 7 : kind == IP_INT6 ? 31 : 127;
    const int fours[] = {0, 1, 2, 3, 4, 6, 8, 12};
    int64_t groups = group == 16 ? (k + 31) / 32 * 2 : group ? (k + group - 1) / group : 1, panels = (n + 15) / 16;
    float *scale = keep<float>(s, panels * groups * 16), *minimum = keep<float>(s, panels * groups * 16);
    for (int64_t i = 0; i < panels * groups * 16; i++) scale[i] = drawn(), minimum[i] = least ? drawn() : 0;
    if (coded)
      for (float *numbers : {scale, minimum}) {
        int64_t units = (k + 255) / 256, per_unit = 256 / group;
        int8_t *code = keep<int8_t>(s, panels * groups * 16);
        uint16_t *unit = keep<uint16_t>(s, panels * units * 16);
        Array<float> value(panels * units * 16);
        for (int64_t i = 0; i < panels * units * 16; i++) {
          int exponent = (int)lrintf(drawn() * 2), sixteenth = (int)lrintf(fabsf(drawn()) * 15);
          unit[i] = (uint16_t)((exponent + 15) << 10 | sixteenth << 6);
          value[i] = ldexpf(1.0f + (float)sixteenth / 16, exponent);
        }
        for (int64_t i = 0; i < panels * groups * 16; i++) {
          int64_t panel = i / 16 / groups, g = i / 16 % groups;
          code[i] = (int8_t)lrintf(drawn() * 127);
          if (numbers == scale || least) numbers[i] = (float)code[i] * value[(panel * units + g / per_unit) * 16 + i % 16];
        }
        if (numbers == scale) s.m.scale_code = code, s.m.scale_unit = unit;
        if (numbers == minimum && least) s.m.minimum_code = code, s.m.minimum_unit = unit;
      }
    Array<int8_t> entries(n * k);
    for (int64_t i = 0; i < n * k; i++) {
      int64_t row = i / k, g = group ? i % k / group : 0;
      float number = drawn();
      entries[i] = (int8_t)lrintf(number * (float)top);
      if (kind == IP_INT4 && least) entries[i] = (int8_t)((fabsf(number) * 15.99f));
      if (kind == IP_MXFP4) entries[i] = (int8_t)((number < 0 ? -1 : 1) * fours[(int)(fabsf(number) * 7.99f)]);
      int64_t at = (row / 16 * groups + g) * 16 + row % 16;
      s.values[(size_t)i] = (float)entries[i] * scale[at] + minimum[at];
    }
    if (!coded) s.m.scale = scale;
    if (!coded && least) s.m.minimum = minimum;
    uint8_t *packed = keep<uint8_t>(s, ip_packed_bytes(&s.m));
    expect(ip_pack_weight(&s.m, entries, packed) == 1, "packing");
    s.m.data = packed;
  }
  return s;
}

// Rows of activations as the product with w rounds them, as the op `quantize` does; of 16 bits, as they are.
std::vector<double> rounded(const ip_bf16 *x, int64_t m, const ip_matrix &w) {
  const int input = w.kind == IP_W8A8 ? IP_INPUT_INT8 : w.input;
  const int64_t group = input == IP_INPUT_MXFP4 ? 32 : w.k;
  std::vector<double> found;
  for (int64_t i = 0; i < m * w.k; i++) found.push_back(widen(x[i]));
  for (int64_t i = 0; i < m && input; i++)
    for (int64_t b = 0; b < w.k; b += group) {
      double *from = found.data() + i * w.k + b, largest = 0;
      const int64_t n = std::min(group, w.k - b);
      for (int64_t c = 0; c < n; c++) largest = fmax(largest, fabs(from[c]));
      float scale = (float)largest / (input == IP_INPUT_INT8 ? 127.0f : 7.5f);
      if (input == IP_INPUT_MXFP4) {  // half of the power of which the largest is 3.5 to 7 times one
        int exponent;
        scale = frexp(largest, &exponent) < 0.875 ? (float)ldexp(1, exponent - 4) : (float)ldexp(1, exponent - 3);
        scale = fmaxf(scale, ldexpf(1, -126));
      }
      if (largest == 0 || scale == 0) scale = 1;
      for (int64_t c = 0; c < n; c++) {
        float number = (float)from[c] / scale, size = fabsf(number);
        if (input == IP_INPUT_INT8) number = fmaxf(-127, fminf(nearbyintf(number), 127));
        if (input == IP_INPUT_INT4) number = fmaxf(-8, fminf(nearbyintf(number), 7));
        if (input == IP_INPUT_MXFP4) {
          float best = 0;
          for (float each : {1.f, 2.f, 3.f, 4.f, 6.f, 8.f, 12.f})
            if (fabsf(each - size) < fabsf(best - size)) best = each;
          number = copysignf(best, number);
        }
        from[c] = (double)number * scale;
      }
    }
  return found;
}

// Kinds whose products round activations to at most 8 bits.
const int kNarrow[][2] = {{IP_W8A8, 0}, {IP_INT4 + kInt8, 32}, {IP_INT4 + kInt8, 96}, {IP_INT4 + kInt8, 128},
                          {IP_INT4 + kInt8, 0}, {IP_INT4 + kInt4, 32}, {IP_INT4 + kInt4, 64},
                          {IP_INT4 + kInt4, 128}, {IP_INT4 + kInt4, 0}, {IP_MXFP4 + kMxfp4, 32}};

bool is_narrow(int kind) { return kind >= kInput || kind == IP_W8A8; }

void products() {
  const int kinds[][2] = {{IP_BF16, 0}, {IP_BF16_REORDERABLE, 0}, {IP_FP8, 128}, {IP_FP8, 24}, {IP_INT8, 0}, {IP_INT8, 64}, {IP_INT8, 128}, {IP_INT4, 32}, {IP_INT4, 96}, {IP_INT4, 0}, {IP_MXFP4, 32}, {IP_MXFP4, 16}, {IP_MXFP4 + kCoded, 16}, {IP_W8A8, 0},
                          {IP_INT8, 16}, {IP_INT8 + kCoded, 16}, {IP_INT8 + kMinimums + kCoded, 16}, {IP_INT8, 32},
                          {IP_INT6, 16}, {IP_INT6 + kCoded, 16}, {IP_INT6 + kMinimums + kCoded, 16}, {IP_INT4 + kMinimums, 32}, {IP_INT4 + kMinimums + kCoded, 32}};
  std::vector<std::pair<int, int>> every;
  for (auto &kind : kinds) every.push_back({kind[0], kind[1]});
  for (auto &kind : kNarrow) every.push_back({kind[0], kind[1]});
  const int64_t sizes[][3] = {{1, 1, 1}, {3, 17, 31}, {16, 33, 160}, {37, 70, 257}, {70, 200, 96}, {85, 144, 300}, {1, 37, 530}, {2, 33, 512}, {66, 33, 513}};
  for (auto [kind, group] : every)
    for (auto &size : sizes) {
      int64_t m = size[0], n = size[1], k = size[2];
      Stored w = weight(kind, group, n, k);
      Bf16 x(m * k), bias(n), narrowed(m * n), rows(n * k);
      Array<float> y(m * n);
      const std::vector<double> inputs = rounded(x, m, w.m);
      auto close = [&](double share) {
        double worst = 0, most = 1e-5;  // a single entry may be 0, and offsets cancel to within float32
        for (int64_t i = 0; i < m; i++)
          for (int64_t j = 0; j < n; j++) {
            double want = 0;
            for (int64_t c = 0; c < k; c++) want += inputs[(size_t)(i * k + c)] * w.values[(size_t)(j * k + c)];
            worst = fmax(worst, fabs(want - y[i * n + j])), most = fmax(most, fabs(want));
          }
        return worst <= share * most;
      };
      ip_linear(&w.m, x, k, m, y, n, 1);
      expect(close(is_narrow(kind) ? 1e-5 : 1e-3), "a product");
      if (ip_linear_prefill(&w.m, x, k, m, y, n, 1)) expect(close(is_narrow(kind) ? 1e-5 : 1e-2), "a product of many rows");
      w.m.bias = bias;
      ip_linear(&w.m, x, k, m, narrowed, n, 0);
      ip_linear_prefill(&w.m, x, k, m, narrowed, n, 0);
      ip_dequantize_rows(&w.m, 0, n, rows);
      ip_dequantize_rows(&w.m, n / 2, n, rows);
    }
}

// Rows that are not finite give no number, rows so small that their scale has few bits give their own, and neither
// changes another row.
void wild_rows() {
  std::vector<std::pair<int, int>> every = {{IP_INT8, 64}, {IP_INT6, 16}, {IP_INT4, 32}, {IP_MXFP4, 32}, {IP_MXFP4, 16}};
  for (auto &kind : kNarrow) every.push_back({kind[0], kind[1]});
  for (auto [kind, group] : every)
    for (int64_t m : {5, 37}) {
      const int64_t n = 33, k = 131;
      Stored w = weight(kind, group, n, k);
      Bf16 x(m * k);
      for (int64_t c = 0; c < k; c++) x[c] = narrow(drawn() * 1e-40f), x[3 * k + c] = 0;
      x[k] = x[2 * k - 1] = narrow(NAN), x[2 * k + 70] = narrow(-INFINITY), x[2 * k + 71] = narrow(INFINITY);
      const std::vector<double> inputs = rounded(x, m, w.m);
      for (int prefill : {0, 1}) {
        Array<float> y(m * n);
        if (!prefill) ip_linear(&w.m, x, k, m, y, n, 1);
        if (prefill && (!is_narrow(kind) || !ip_linear_prefill(&w.m, x, k, m, y, n, 1))) continue;
        bool right = true;
        for (int64_t i = 0; i < m; i++)
          for (int64_t j = 0; j < n; j++) {
            double want = 0, size = 0, got = y[i * n + j];
            for (int64_t c = 0; c < k; c++) {
              double product = inputs[(size_t)(i * k + c)] * w.values[(size_t)(j * k + c)];
              want += product, size += fabs(product);
            }
            if (i == 1 || i == 2)
              right &= !isfinite(got);
            else if (i)
              right &= fabs(want - got) <= 1e-4 * size;
            else if (is_narrow(kind))
              right &= fabs(want - got) <= 5e-2 * size;
          }
        expect(right, "a product with rows that are not finite, tiny or zero");
      }
    }
}

void row_by_row() {
  for (int64_t d : {1, 7, 16, 90, 257}) {
    int64_t m = 5;
    Bf16 x(m * d), r(m * d), weight(d), s(m * d), y(m * d), wide(m * 2 * d);
    ip_norm norm = {weight, 1e-6f, 1};
    ip_rms_norm(x, d, nullptr, &norm, m, d, nullptr, y);
    ip_rms_norm(x, d, r, &norm, m, d, s, y);
    for (int function : {IP_SILU, IP_GELU, IP_GELU_TANH, IP_RELU2}) {
      const ip_gate_limits limits = {0.5f, 0.3f, 0.4f};
      ip_activation_mul(wide, 2 * d, m, d, function, nullptr, y);
      ip_activation_mul(wide, 2 * d, m, d, function, &limits, y);
    }
  }
  for (int64_t dim : {2, 22, 64}) {
    Bf16 x(3 * 4 * dim), y(3 * 4 * dim);
    Array<float> table(9 * dim);
    Array<int64_t> positions(3);
    positions[1] = 8;
    for (int interleaved : {0, 1}) ip_rope(x, 4 * dim, dim, table, positions, 3, 4, dim, interleaved, y);
  }
}

// Three sequences (one padded) over scattered blocks.
struct Step {
  Array<int32_t> start{4}, lens{3}, tables{3 * 40};
  Array<int64_t> positions, slots;
  ip_batch batch;
  int64_t tokens = 0;
  Step(int32_t many, int32_t length) : positions(many + 2), slots(many + 2) {
    int32_t news[3] = {1, many, 1}, all[3] = {length, many + length, 0};
    for (int b = 0; b < 3; b++) {
      start[b + 1] = start[b] + news[b], lens[b] = all[b];
      for (int i = 0; i < 40; i++) tables[b * 40 + i] = b * 40 + 39 - i;
      for (int i = 0; i < news[b]; i++, tokens++) {
        positions[tokens] = all[b] ? all[b] - news[b] + i : 0;
        int64_t p = positions[tokens];
        slots[tokens] = all[b] ? (int64_t)tables[b * 40 + p / 16] * 16 + p % 16 : -1;
      }
    }
    batch = {start, lens, tables, 3, 40};
  }
};

// K and V of a layer, or latents, in bf16, int8 or FP8.
struct Cache {
  Bf16 k, v;
  Array<int8_t> k8, v8;
  Array<float> k_scale, v_scale;
  ip_cache c;
  Cache(int32_t kind, int64_t slots, int64_t heads, int64_t dim, int64_t v_dim, int64_t groups)
      : k(kind ? 0 : slots * heads * dim), v(kind ? 0 : slots * heads * v_dim), k8(kind ? slots * heads * dim : 0),
        v8(kind ? slots * heads * v_dim : 0), k_scale(kind ? slots * groups : 0), v_scale(kind && v_dim ? slots * groups : 0) {
    const bool coded = kind;
    int64_t ks = heads * dim, vs = heads * v_dim;
    auto entry = [&] {  // no NaN of FP8, bytes 0x7f and 0xff: it would reach every layer behind
      int8_t e = (int8_t)lrintf(drawn() * 127);
      return kind == IP_KV_FP8 && (e == 127 || e == -1) ? (int8_t)(e - 1) : e;
    };
    for (int64_t i = 0; coded && i < slots * ks; i++) k8[i] = entry();
    for (int64_t i = 0; coded && i < slots * vs; i++) v8[i] = entry();
    for (int64_t i = 0; coded && i < slots * groups; i++) k_scale[i] = drawn() / 127;
    for (int64_t i = 0; coded && v_dim && i < slots * groups; i++) v_scale[i] = drawn() / 127;
    void *first = coded ? (void *)(int8_t *)k8 : (ip_bf16 *)k, *second = coded ? (void *)(int8_t *)v8 : (ip_bf16 *)v;
    if (coded)
      c = {first, v_dim ? second : first, ks, v_dim ? vs : ks, k_scale, v_dim ? v_scale : k_scale, groups, groups, 16};
    else
      c = {first, v_dim ? second : first, ks, v_dim ? vs : ks, nullptr, nullptr, 0, 0, 16};
    c.k_kind = c.v_kind = kind;
  }
};

// Attention over values of 4 bits, and keys of 4 bits or int8, where entries are multiplied as they lie, beside the same
// with a soft cap that changes nothing, for which they are converted. A record is that of a span and head: entries and
// ranges of keys, if those are differences, and the first key; entries and ranges of values.
void attention_over_4_bits(bool differences) {
  for (int32_t length : {1, 20, 300, 600})
    for (int64_t dim : {32, 96}) {
      Step step(5, length);
      const int64_t heads = length == 20 ? 14 : 6, kv = 2, slots = 120 * 16, entries = kv * dim;
      const int64_t group = differences ? 32 : 16, key_bytes = differences ? dim * 13 : 0;
      const int64_t record = key_bytes + dim * 8 + dim / group * 64, records = slots / 16 * kv;
      Array<int8_t> k(differences ? 0 : slots * entries), spans(records * record);
      Array<float> k_scale(slots * kv);
      auto fill = [](auto &to, int64_t n) {
        for (int64_t i = 0; i < n; i++) to[i] = (int8_t)lrintf(drawn() * 127);
      };
      auto fill_ranges = [&](int64_t at, int64_t groups) {  // in float16: 2^-5 and more, -1/4 and less
        for (int64_t r = 0; r < records; r++)
          for (int64_t i = 0; i < groups * 32; i++) {
            uint16_t x = (uint16_t)((i / 16 % 2 ? 0xb400 : 0x2800) + (int)(fabsf(drawn()) * 1000));
            memcpy((int8_t *)spans + r * record + at + i * 2, &x, 2);
          }
      };
      fill(k, differences ? 0 : slots * entries), fill(spans, records * record);
      if (differences) fill_ranges(dim * 8, dim / 16);
      fill_ranges(key_bytes + dim * 8, dim / group);
      for (int64_t i = 0; i < slots * kv; i++) k_scale[i] = fabsf(drawn()) / 127;
      int8_t *keys = spans, *values = keys + key_bytes;
      ip_cache cache = {differences ? keys : (int8_t *)k, values, differences ? kv * record : entries, kv * record,
                        differences ? nullptr : (float *)k_scale, nullptr, differences ? 16 : kv, group, 16};
      cache.k_kind = differences ? IP_KV_INT4_DIFFERENCES : IP_KV_INT8, cache.v_kind = IP_KV_INT4;
      cache.v_ranges = (ip_bf16 *)(values + dim * 8), cache.k_head = cache.v_head = record;
      if (differences) cache.k_ranges = (ip_bf16 *)(keys + dim * 8), cache.first = keys + dim * 12;
      if (differences) cache.first_scale = k_scale;
      const int64_t n = step.tokens * heads * dim;
      Bf16 q(n);
      Array<ip_bf16> out(n), converted(n);  // zeros: rows of padding are not written
      for (int64_t window : {0, 20}) {
        ip_attention(q, &step.batch, &cache, heads, kv, dim, dim, 0.2f, window, nullptr, 0, out);
        ip_attention(q, &step.batch, &cache, heads, kv, dim, dim, 0.2f, window, nullptr, 1e4f, converted);
        float worst = 0, most = 0;
        for (int64_t i = 0; i < n; i++) {
          worst = fmaxf(worst, fabsf(widen(out[i]) - widen(converted[i])));
          most = fmaxf(most, fabsf(widen(converted[i])));
        }
        expect(worst <= 0.03f * most, "attention over 4 bits");
      }
    }
}

void attention(int32_t kind) {
  for (int32_t length : {1, 20, 300, 600})
    for (int64_t dim : {22, 64}) {
      Step step(5, length);
      int64_t heads = length == 20 ? 16 : 6, kv = 2, slots = 120 * 16;
      Bf16 q(step.tokens * heads * dim), out(step.tokens * heads * dim);
      Cache held(kind, slots, kv, dim, dim, kv);
      ip_cache cache = held.c;
      std::vector<float> sinks(heads, 0.5f);
      for (int64_t window : {0, 20}) {
        ip_attention(q, &step.batch, &cache, heads, kv, dim, dim, 0.2f, window, sinks.data(), 3.0f, out);
        ip_attention(q, &step.batch, &cache, heads, kv, dim, dim, 0.2f, window, nullptr, 0, out);
      }
      expect(isfinite(widen(out[0])), "attention");
      Step prompt(75, length < 500 ? length : 400);
      Bf16 qs(prompt.tokens * heads * dim), outs(prompt.tokens * heads * dim);
      Bf16 few(prompt.tokens * heads * dim);
      for (int64_t window : {0, 20}) {
        const float *sink = window ? sinks.data() : nullptr;
        float cap = window ? 3.0f : 0.0f;
        if (!ip_attention_prefill(qs, &prompt.batch, &cache, heads, kv, dim, dim, 0.2f, window, sink, cap, outs))
          continue;
        ip_attention(qs, &prompt.batch, &cache, heads, kv, dim, dim, 0.2f, window, sink, cap, few);
        double worst = 0, most = 0;
        for (int64_t i = 0; i < (prompt.tokens - 1) * heads * dim; i++)  // the last row is padding
          worst = fmax(worst, fabs(widen(outs[i]) - widen(few[i]))), most = fmax(most, fabs(widen(few[i])));
        expect(worst <= 0.02 * most, "attention of many tokens");
      }
      int64_t nope = 12, rope = 8, value = 20, latent = 40;
      Bf16 a(step.tokens * 3 * nope), b(step.tokens * 3 * rope), w(3 * (nope + value) * latent);
      Bf16 mixed(step.tokens * 3 * value);
      Cache latent_cache(kind, slots, 1, latent + rope, 0, length == 20 ? 1 : 6);
      ip_cache latents = latent_cache.c;
      int64_t ns[] = {3 * nope, nope}, rs[] = {3 * rope, rope};
      ip_matrix kv_b = {IP_BF16, 0, 3 * (nope + value), latent, latent, (ip_bf16 *)w, nullptr, nullptr, nullptr};
      ip_mla(a, ns, b, rs, &kv_b, &step.batch, &latents, 3, nope, rope, value, latent, 0.2f, mixed);
      expect(isfinite(widen(mixed[0])), "latent attention");
      for (int64_t top : {1, 17, 700}) {
        const int64_t index_heads = 19, index_dim = 10;
        Cache index_cache(kind, slots, 1, index_dim, 0, 1);
        Bf16 iq(step.tokens * index_heads * index_dim);
        std::vector<float> iw(step.tokens * index_heads);
        for (float &x : iw) x = drawn();
        Array<int32_t> chosen(step.tokens * top);
        ip_index_select(iq, iw.data(), &step.batch, &index_cache.c, index_heads, index_dim, top, 1, chosen);
        for (int64_t i = 0; i + 1 < top; i++)
          expect(chosen[i + 1] < 0 || chosen[i] < chosen[i + 1], "positions that are chosen ascend");
        Bf16 sparse(step.tokens * 3 * value);
        ip_sparse_mla(a, ns, b, rs, &kv_b, &step.batch, &latents, 3, nope, rope, value, latent, 0.2f, chosen, top, sparse);
        bool same = true;
        for (int64_t i = 0; i < (step.tokens - 1) * 3 * value; i++) same = same && sparse[i] == mixed[i];
        expect(same || top < length + 5, "latent attention over all tokens");
      }
      for (auto &kind : {std::pair(IP_INT8, 128), std::pair(IP_INT4, 32), std::pair(IP_INT4, 0)}) {
        const int64_t nope = 7, value = 6, ns[] = {3 * nope, nope};  // heads begin within a panel, and end within the last
        Stored panels = weight(kind.first, kind.second, 3 * (nope + value), latent);
        Bf16 rows(3 * (nope + value) * latent), want(step.tokens * 3 * value);
        ip_dequantize_rows(&panels.m, 0, 3 * (nope + value), rows);
        ip_matrix plain = {IP_BF16, 0, 3 * (nope + value), latent, latent, (ip_bf16 *)rows, nullptr, nullptr, nullptr};
        ip_mla(a, ns, b, rs, &panels.m, &step.batch, &latents, 3, nope, rope, value, latent, 0.002f, mixed);
        ip_mla(a, ns, b, rs, &plain, &step.batch, &latents, 3, nope, rope, value, latent, 0.002f, want);  // or a rounding decides
        double worst = 0, most = 0;
        for (int64_t i = 0; i < (step.tokens - 1) * 3 * value; i++)
          worst = fmax(worst, fabs(widen(mixed[i]) - widen(want[i]))), most = fmax(most, fabs(widen(want[i])));
        expect(worst <= 0.03 * most, "latent attention with a kv_b in panels");
      }
    }
}

void experts() {
  const int kinds[][2] = {{IP_BF16, 0}, {IP_BF16_REORDERABLE, 0}, {IP_FP8, 128}, {IP_INT8, 0}, {IP_INT4, 32}, {IP_MXFP4, 32}, {IP_W8A8, 0},
                          {IP_INT4 + kInt8, 32}, {IP_INT4 + kInt4, 0}, {IP_MXFP4 + kMxfp4, 32}};
  const ip_clamped_gate gate = {1.7f, 0.5f};
  const ip_gate_limits limits = {0.5f, INFINITY, 0.5f};
  for (auto &kind : kinds)
    for (int64_t inner : {37, 48}) {
      int64_t width = kind[0] == IP_BF16_REORDERABLE ? 530 : 33;
      std::vector<Stored> up, down;
      std::vector<ip_matrix> ups, downs;
      for (int e = 0; e < 5; e++) {
        up.push_back(weight(kind[0], kind[1], 2 * inner, width)), down.push_back(weight(kind[0], kind[1], width, inner));
        for (Stored *w : {&up.back(), &down.back()}) {
          ip_bf16 *bias = keep<ip_bf16>(*w, w->m.n);
          for (int64_t i = 0; i < w->m.n; i++) bias[i] = narrow(drawn());
          w->m.bias = bias;
        }
        ups.push_back(up.back().m), downs.push_back(down.back().m);
      }
      for (int64_t m : {1, 70, 300}) {
        Bf16 x(m * width), out(m * width);
        Array<int64_t> ids(m * 2);
        Array<float> weights(m * 2);
        for (int64_t i = 0; i < 2 * m; i++) ids[i] = i % 4, weights[i] = 0.5f;
        expect(ip_moe(ups.data(), downs.data(), 5, nullptr, nullptr, x, width, m, ids, weights, 2, out) == 0, "experts");
        expect(ip_moe(ups.data(), downs.data(), 5, &gate, nullptr, x, width, m, ids, weights, 2, out) == 0, "clamped experts");
        expect(ip_moe(ups.data(), downs.data(), 5, nullptr, &limits, x, width, m, ids, weights, 2, out) == 0, "limited experts");
        for (int64_t wrong : {-1, 5, 1 << 30}) {
          ids[2 * m - 1] = wrong;
          expect(ip_moe(ups.data(), downs.data(), 5, nullptr, nullptr, x, width, m, ids, weights, 2, out) == -1, "an expert that is none");
        }
      }
    }
}

template <class T>
void hyper_connections(int32_t wide) {
  for (int64_t streams : {1, 3, 4, 8})
    for (int64_t width : {5, 37, 1100})
      for (int64_t tokens : {1, 4, 7}) {
        int64_t rows = streams * (streams + 2);
        T x(tokens * streams * width), y(tokens * width), out(tokens * streams * width);
        Array<float> fn(rows * streams * width), base(rows), scale(3), post(tokens * streams);
        Array<float> mix(tokens * streams * streams);
        ip_hyper hyper = {fn, base, scale, streams, width, 1e-6f, 1e-6f, 1e-6f, 20, 0, wide};
        ip_hyper_pre(&hyper, x, tokens, y, post, mix);
        ip_hyper_post(&hyper, y, x, post, mix, tokens, out);
        hyper.iterations = 0, ip_hyper_pre(&hyper, x, tokens, y, post, mix);
        ip_sinkhorn(mix, tokens, streams, 3, 1e-6f);
        hyper.head = 1, ip_hyper_pre(&hyper, x, tokens, y, nullptr, nullptr);
      }
}

void layers(int32_t stored) {
  const int kinds[][2] = {{IP_BF16, 0},   {IP_BF16_REORDERABLE, 0}, {IP_FP8, 128}, {IP_INT8, 64},
                          {IP_INT8, 128}, {IP_INT4, 32},       {IP_INT4, 96}, {IP_W8A8, 0},
                          {IP_INT8 + kCoded, 16}, {IP_INT6 + kCoded, 16}, {IP_INT4 + kMinimums + kCoded, 32},
                          {IP_INT4 + kInt8, 32}, {IP_INT4 + kInt4, 0}, {IP_MXFP4 + kMxfp4, 32}};
  for (auto &kind : kinds)
    for (int32_t many : {1, 8, 90}) {
      int64_t width = kind[0] == IP_BF16_REORDERABLE ? 530 : 70, heads = 4, kv = 2, dim = many > 8 ? 32 : 22, inner = 48, slots = 120 * 16;
      Stored qkv = weight(kind[0], kind[1], (heads + 2 * kv) * dim, width), o = weight(kind[0], kind[1], width, heads * dim);
      Stored gate_up = weight(kind[0], kind[1], 2 * inner, width), down = weight(kind[0], kind[1], width, inner);
      Bf16 n1(width), n2(width), n3(width), n4(width), qn(dim), kn(dim);
      Cache held(stored, slots, kv, dim, dim, kv);
      Array<float> rope(700 * dim);
      ip_layer layer = {qkv.m, o.m, gate_up.m, down.m};
      layer.attn_norm = {n1, 1e-6f, 0}, layer.mlp_norm = {n2, 1e-6f, 0}, layer.q_norm = {qn, 1e-6f, 0};
      layer.k_norm = {kn, 1e-6f, 0}, layer.rope = rope, layer.heads = heads, layer.kv_heads = kv;
      layer.head_dim = dim, layer.scale = 0.2f, layer.rounded = many > 8;
      Step s(many, 300);
      ip_step step = {s.batch, held.c, s.positions, s.slots, s.tokens};
      Bf16 x(s.tokens * width), r(s.tokens * width), y(s.tokens * width), sum(s.tokens * width);
      ip_decoder_layer(&layer, &step, x, nullptr, y, sum);
      ip_decoder_layer(&layer, &step, x, r, y, sum);
      layer.attn_after = {n3, 1e-6f, 1}, layer.mlp_after = {n4, 1e-6f, 1}, layer.activation = IP_GELU_TANH;
      ip_decoder_layer(&layer, &step, x, r, y, sum);
    }
}

// What a layer writes to a cache in int8 of a token that is not finite: zeros and a scale that is no number, as the op
// `quantize` has it; entries of other tokens are theirs.
void wild_entries() {
  const int64_t width = 70, heads = 4, kv = 2, dim = 22, inner = 48, slots = 120 * 16;
  Stored qkv = weight(IP_BF16, 0, (heads + 2 * kv) * dim, width), o = weight(IP_BF16, 0, width, heads * dim);
  Stored gate_up = weight(IP_BF16, 0, 2 * inner, width), down = weight(IP_BF16, 0, width, inner);
  Bf16 n1(width), n2(width);
  Array<float> rope(700 * dim);
  for (int64_t i = 0; i < 700 * dim; i++) rope[i] = i / (dim / 2) % 2 ? 0.6f : 0.8f;
  for (float wild : {NAN, INFINITY}) {
    Cache held(IP_KV_INT8, slots, kv, dim, dim, kv);
    ip_layer layer = {qkv.m, o.m, gate_up.m, down.m};
    layer.attn_norm = {n1, 1e-6f, 0}, layer.mlp_norm = {n2, 1e-6f, 0}, layer.rope = rope, layer.heads = heads;
    layer.kv_heads = kv, layer.head_dim = dim, layer.scale = 0.2f;
    Step s(5, 300);
    ip_step step = {s.batch, held.c, s.positions, s.slots, s.tokens};
    Bf16 x(s.tokens * width), y(s.tokens * width), sum(s.tokens * width);
    x[2 * width + 9] = narrow(wild);
    ip_decoder_layer(&layer, &step, x, nullptr, y, sum);
    for (int64_t t = 0; t < s.tokens; t++) {
      if (s.slots[t] < 0) continue;
      bool zeros = true, no_numbers = true, numbers = true;
      for (int64_t c = 0; c < kv * dim; c++) zeros &= !held.k8[s.slots[t] * kv * dim + c];
      for (int64_t g = 0; g < kv; g++) {
        float scale = held.k_scale[s.slots[t] * kv + g];
        no_numbers &= !isfinite(scale), numbers &= scale > 0;
      }
      expect(t == 2 ? zeros && no_numbers : !zeros && numbers, "entries of a token that is not finite, and of others");
    }
  }
}

// Latent attention, a dense layer and one with experts, alone and in one call.
void latent_layers(int32_t stored) {
  const int kinds[][2] = {{IP_BF16, 0}, {IP_FP8, 128}, {IP_INT8, 64}, {IP_INT8, 128}, {IP_INT4, 32}, {IP_INT4, 96}, {IP_W8A8, 0}};
  const int64_t width = 70, heads = 3, nope = 12, rope = 8, value = 20, latent = 40, low = 90, inner = 48, slots = 120 * 16;
  for (auto &kind : kinds)
    for (int32_t many : {1, 6, 20}) {
      auto made = [&](int64_t n, int64_t k) { return weight(kind[0], kind[1], n, k); };
      Stored q_a = made(low, width), q_b = made(heads * (nope + rope), low), kv_a = made(latent + rope, width);
      Stored kv_b = weight(kind[0] == IP_W8A8 ? IP_INT8 : kind[0], kind[1], heads * (nope + value), latent);
      Stored o = made(width, heads * value);
      Stored gate_up = made(2 * inner, width), down = made(width, inner), router = weight(IP_BF16, 0, 8, width);
      std::vector<Stored> up, back;
      std::vector<ip_matrix> ups, backs;
      for (int e = 0; e < 8; e++) {
        up.push_back(made(2 * 37, width)), back.push_back(made(width, 37));
        ups.push_back(up.back().m), backs.push_back(back.back().m);
      }
      Bf16 n1(width), n2(width), n3(low), n4(latent);
      Cache cached(stored, slots, 1, latent + rope, 0, 3), more(stored, slots, 1, latent + rope, 0, 3);
      Array<float> table(700 * rope), bias(8);
      ip_latent lower = {q_a.m, q_b.m, kv_a.m, kv_b.m, {n3, 1e-6f, 0}, {n4, 1e-6f, 0}, nope, rope, value, latent};
      ip_experts routed = {router.m, bias, ups.data(), backs.data(), 8, 3, 4, 2, 2.5f, 1, 1, 1, nullptr, 0.5f, 0.01f};
      Array<float> logits(5 * 8), shares(5 * 3);
      Array<int64_t> ids(5 * 3);
      for (int32_t score : {IP_SOFTMAX, IP_SQRT_SOFTPLUS, IP_SIGMOID}) {
        routed.score = score;
        ip_route_experts(&routed, logits, 5, ids, shares);
        ip_expert_weights(&routed, logits, 5, ids, shares);
      }
      ip_layer dense = {{}, o.m, gate_up.m, down.m};
      dense.attn_norm = {n1, 1e-6f, 0}, dense.mlp_norm = {n2, 1e-6f, 0}, dense.rope = table, dense.heads = heads;
      dense.kv_heads = 1, dense.scale = 0.2f, dense.interleaved = 1, dense.latent = &lower;
      ip_layer sparse = dense, alone;
      sparse.routed = &routed;
      alone = sparse;
      alone.gate_up = alone.down = {};
      Step s(many, 300);
      ip_cache caches[] = {cached.c, more.c};
      ip_step step = {s.batch, caches[0], s.positions, s.slots, s.tokens};
      Bf16 x(s.tokens * width), y(s.tokens * width), sum(s.tokens * width), y2(s.tokens * width), sum2(s.tokens * width);
      ip_decoder_layer(&alone, &step, x, nullptr, y, sum);
      ip_decoder_layer(&dense, &step, x, nullptr, y, sum);
      step.cache = caches[1];
      ip_decoder_layer(&sparse, &step, y, sum, y2, sum2);
      expect(isfinite(widen(y2[0])), "layers with latents and experts");
      const ip_layer *both[] = {&dense, &sparse};
      Bf16 y3(s.tokens * width), sum3(s.tokens * width);
      const ip_step *every[] = {&step, &step};
      const int32_t second[] = {0, 1};
      const ip_layer_steps steps = {every, many == 6 ? second : nullptr};
      bool done = ip_decoder_layers(both, caches, 2, &steps, x, nullptr, y3, sum3);
      expect(done == (s.tokens <= 8), "which steps are layers in one call");
      if (done) expect(!memcmp(y2, y3, s.tokens * width * 2) && !memcmp(sum2, sum3, s.tokens * width * 2), "layers in one call");
    }
}

// Kimi Delta Attention: decays by channel, alone and in a block; odd sizes.
void by_channel(const ip_sequences &rows, const ip_sequences &in_slots, int64_t tokens, int64_t size, int64_t width) {
  const int64_t heads = 3, dim = 19, inner = heads * dim, rank = 9;
  Array<float> a_log(heads), dt_bias(inner), decay(tokens * inner), beta(tokens * heads), norm_weight(dim);
  Array<float> state(7 * inner * dim), after(4 * inner * dim);
  Bf16 a(tokens * inner), b(tokens * heads), qkv(tokens * 3 * inner), out(tokens * inner);
  ip_delta_rule_gates(a_log, dt_bias, a, inner, b, heads, tokens, heads, dim, decay, beta);
  for (int64_t i = 0; i < tokens * inner; i++) expect(decay[i] <= 0, "a decay of a channel");
  ip_delta_rule rule = {heads, heads, dim, dim, 1};
  ip_head_rows parts[] = {{qkv, 3 * inner, dim}, {qkv + inner, 3 * inner, dim}, {qkv + 2 * inner, 3 * inner, dim}};
  ip_gated_delta_rule(&rule, &rows, parts, decay, inner, beta, heads, state, after, out);
  expect(isfinite(widen(out[0])) && isfinite(after[0]), "the delta rule by channel");
  Bf16 taps(size * 3 * inner), states(7 * 3 * inner * (size - 1)), input(tokens * width), result(tokens * width);
  Stored proj = weight(IP_INT8, 32, 3 * inner, width), o = weight(IP_INT4, 32, width, inner);
  Stored gates = weight(IP_BF16, 0, heads, width), low = weight(IP_BF16, 0, 2 * rank, width);
  Stored decay_up = weight(IP_BF16, 0, inner, rank), gate_up = weight(IP_BF16, 0, inner, rank);
  ip_mixer mixer = {};
  mixer.proj = proj.m, mixer.gates = gates.m, mixer.o = o.m, mixer.low = low.m;
  mixer.decay_up = decay_up.m, mixer.gate_up = gate_up.m, mixer.rule = rule, mixer.kind = IP_KIMI_DELTA;
  mixer.conv = {taps, nullptr, 3 * inner, size, 1}, mixer.norm = {norm_weight, 1, 1e-6f, 0, 1};
  mixer.a_log = a_log, mixer.dt_bias = dt_bias;
  ip_recurrent_block(&mixer, &in_slots, input, states, state, result);
  expect(isfinite(widen(result[0])), "a block by channel");
}

// Recurrences of sequences that begin, go on and are padding, with states in the slots of a cache; odd sizes.
void recurrence() {
  const int64_t tokens = 12, groups = 2, heads = 6, k = 7, v = 21, channels = 2 * groups * k + heads * v, width = 33;
  const int32_t start[] = {0, 1, 4, 5, 12}, lens[] = {9, 2, 0, 7};
  const int64_t slots[] = {5, -1, 1, 2, -1, 1, 2, 3, 4, 5, 6, 7}, read[] = {3, 1, 0, 6}, write[] = {2, 5, 0, 4};
  ip_sequences rows = {start, lens, slots, nullptr, nullptr, 4}, in_slots = {start, lens, slots, read, write, 4};
  Array<float> a_log(heads), dt_bias(heads), skip(heads), state(7 * heads * k * v), after(4 * heads * k * v);
  Array<float> decay(tokens * heads), beta(tokens * heads), norm_weight(heads * v);
  for (int64_t size : {2, 4, 5}) {
    Bf16 taps(size * channels), bias(channels), x(tokens * (channels + 3)), y(tokens * channels);
    Bf16 before(7 * channels * (size - 1)), next(4 * channels * (size - 1));
    ip_convolution conv = {taps, bias, channels, size, 1};
    ip_causal_conv1d(&conv, &rows, x, channels + 3, before, next, y);
    expect(!memcmp(next + 2 * channels * (size - 1), before + 2 * channels * (size - 1), channels * (size - 1) * 2),
           "a padded sequence's inputs");
    Bf16 a(tokens * heads);
    ip_delta_rule_gates(a_log, dt_bias, a, heads, a, heads, tokens, heads, 0, decay, beta);
    ip_delta_rule rule = {groups, heads, k, v, 0};
    ip_head_rows qkv[] = {{y, channels, k}, {y + groups * k, channels, k}, {y + 2 * groups * k, channels, v}};
    Bf16 out(tokens * heads * v), gate(tokens * heads * v);
    ip_gated_delta_rule(&rule, &rows, qkv, decay, heads, beta, heads, state, after, out);
    expect(isfinite(widen(out[0])) && isfinite(after[0]), "the delta rule");
    // The same rows as x, b and c of a scan: `groups` heads of k entries as b and c.
    ip_scan scan = {a_log, dt_bias, skip, groups, heads, v, k, 0, 1};
    ip_head_rows xbc[] = {qkv[2], qkv[0], qkv[1]};
    ip_selective_scan(&scan, &rows, xbc, a, heads, state, after, out);
    ip_norm_with_gate by_head = {norm_weight, 1, 1e-6f, 0, 0}, whole = {norm_weight, 3, 1e-6f, 1, 0};
    ip_head_rows heads_of = {out, heads * v, v}, gates_of = {gate, heads * v, v};
    Bf16 normed(tokens * heads * v);
    ip_gated_norm(&by_head, &heads_of, &gates_of, tokens, heads, v, normed);
    ip_gated_norm(&whole, &heads_of, &gates_of, tokens, 1, heads * v, normed);
    for (int kind : {IP_DELTA_NET, IP_MAMBA2, IP_SHORT_CONV})
      for (int32_t grouped : {0, 1}) {
        if (grouped && kind != IP_DELTA_NET) continue;
        int64_t inner = kind == IP_SHORT_CONV ? channels : heads * v;
        int64_t projected = kind == IP_SHORT_CONV ? 3 * channels : channels + inner + (kind == IP_MAMBA2 ? heads : 0);
        Stored proj = weight(IP_INT8, 32, projected, width), ba = weight(IP_BF16, 0, 2 * heads, width);
        Stored o = weight(IP_INT4, 32, width, inner);
        Array<float> factors(projected);
        ip_mixer mixer = {proj.m, {}, o.m, {}, {}, {}, conv, rule, scan, kind == IP_MAMBA2 ? whole : by_head, a_log, dt_bias,
                          nullptr, kind, grouped};
        if (kind == IP_DELTA_NET) mixer.gates = ba.m;
        if (kind == IP_MAMBA2) mixer.factors = factors;
        Bf16 input(tokens * width), result(tokens * width);
        ip_recurrent_block(&mixer, &in_slots, input, before, state, result);
        expect(isfinite(widen(result[0])), "a recurrent block");
      }
    by_channel(rows, in_slots, tokens, size, width);
  }
}

// Whether `token` is drawn where weights are doubles and cuts less sharp by `slack`, or would be if `uniform` were another
// one by a 10,000th of all.
bool may_be_drawn(const std::vector<float> &x, int64_t token, float degrees, int64_t k, float p, float least, double u,
                  bool by_rank, double slack) {
  std::vector<int64_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  if (by_rank) std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
  float top = *std::max_element(x.begin(), x.end());
  double total = 0, upto = 0, kept = 0;
  std::vector<double> w;
  for (size_t i = 0; i < x.size() && !(by_rank && k && (int64_t)i >= k); i++)
    w.push_back(exp(((double)x[order[i]] - top) / degrees)), total += w.back();
  for (size_t i = 0; i < w.size(); i++) {
    bool in = !by_rank || !i || (upto < p * total * (1 + slack) && w[i] >= least * (1 - slack));
    upto += w[i], kept += in ? w[i] : w[i] = 0;
  }
  upto = 0;
  for (size_t i = 0; i < w.size(); upto += w[i++])
    if (order[i] == token) return w[i] > 0 && u * kept > upto - 1e-4 * total && u * kept < upto + w[i] + 1e-4 * total;
  return false;
}

void sampling() {
  for (int64_t vocab : {1, 7, 16, 1023, 1024, 1041, 5003, 40001})
    for (float spread : {0.0f, 0.1f, 9.0f})
      for (int half : {0, 1}) {
        const int64_t rows = 9;
        Array<float> x(rows * vocab), degrees(rows), p(rows), least(rows), u(rows);
        Array<ip_bf16> narrowed(rows * vocab);
        Array<int64_t> k(rows), tokens(rows);
        std::vector<std::vector<float>> each((size_t)rows);
        for (int64_t i = 0; i < rows * vocab; i++) {
          x[i] = spread * (drawn() + drawn()), narrowed[i] = narrow(x[i]);
          if (i % 11 == 4 && i % vocab) x[i] = -INFINITY, narrowed[i] = 0xff80;
          each[(size_t)(i / vocab)].push_back(half ? widen(narrowed[i]) : x[i]);
        }
        for (int64_t i = 0; i < rows; i++) {
          degrees[i] = 1.1f + drawn(), u[i] = i ? (drawn() + 1) / 2.0001f : 0;
          k[i] = i % 3 == 1 ? 1 + i * i * i * 5 : 0, p[i] = i % 3 ? 1 : 0.5f + drawn() / 2.01f, least[i] = i == 2 ? 0.3f : 0;
        }
        const void *logits = half ? (const void *)(ip_bf16 *)narrowed : (float *)x;
        ip_sampling asked = {logits, half, vocab, rows, vocab, degrees, nullptr, nullptr, u, nullptr};
        for (int by_rank : {0, 1}) {
          auto may = [&](int64_t i, double slack) {
            return may_be_drawn(each[(size_t)i], tokens[i], degrees[i], k[i], p[i], least[i], u[i], by_rank, slack);
          };
          if (by_rank) asked.top_p = p, asked.min_p = least, asked.top_k = k;
          ip_sample(&asked, tokens);
          for (int64_t i = 0; i < rows; i++)
            expect(may(i, 1e-6) || may(i, -1e-6), "a token drawn");
        }
        asked.uniform = nullptr;
        ip_sample(&asked, tokens);
        for (int64_t i = 0; i < rows; i++) {
          auto &row = each[(size_t)i];
          expect(tokens[i] == std::max_element(row.begin(), row.end()) - row.begin(), "the token of the largest logit");
        }
        x[vocab - 1] = NAN, x[2 * vocab - 1] = INFINITY;
        ip_sampling broken = {x, 0, vocab, 2, vocab, degrees, p, least, u, k};
        ip_sample(&broken, tokens);
        expect(tokens[0] == vocab - 1 && tokens[1] == vocab - 1, "a row with NaN, a row with infinity");
      }
}

}  // namespace

// A thread that leaves its core is on another, which it may leave as before; with none to go to it stays.
void cores() {
#ifdef __linux__
  cpu_set_t before, after;
  if (sched_getaffinity(0, sizeof before, &before)) return;
  std::vector<int> all;
  for (int i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &before)) all.push_back(i);
  for (int turn = 0; turn < 100 && all.size() > 1; turn++) {
    int here = current_core();
    expect(move_off_cores(&here, 1) && current_core() != here, "move off a core");
  }
  expect(!move_off_cores(all.data(), (int)all.size()), "move off every core");
  expect(!sched_getaffinity(0, sizeof after, &after) && CPU_EQUAL(&before, &after), "affinity");
#endif
}

int main() {
  cores();
  std::vector<char> names(ip_available_isas(), ip_available_isas() + strlen(ip_available_isas()) + 1);
  for (char *name = strtok(names.data(), " "); name; name = strtok(nullptr, " ")) {
    expect(!ip_select_isa(name), name);
    products();
    wild_rows();
    wild_entries();
    row_by_row();
    experts();
    hyper_connections<Bf16>(0), hyper_connections<Array<float>>(1);
    attention_over_4_bits(true), attention_over_4_bits(false);
    for (int32_t kind : {IP_KV_BF16, IP_KV_INT8, IP_KV_FP8}) {
      attention(kind);
      layers(kind);
      latent_layers(kind);
    }
    recurrence();
    sampling();
    printf("%s: done\n", name);
  }
  return failures != 0;
}
