// A unit of work of attention over few query tokens: its query rows, the keys that it sees of a span, and where its
// partial results go. paged_attention.h and int4_attention.h compute units.
#pragma once
#include "attention/int4_scores.h"

namespace {

// The query rows of one KV head of a task, in the form that the product with its keys reads: `int16` for int8 keys
// without tiles, `int8` beside it for keys of 4 bits in integers (int4_scores.h), else `rows`.
struct Queries {
  ActivationRows rows;
  Int16Rows int16;
  Int8Rows int8;
};

constexpr int kQueryBuffers = 3;  // workspaces of `lay_out_queries`

constexpr float kLog2E = 1.44269504f;

// Lays out m query rows of args.dim entries, where row(i) points to row i, in `s` of the calling thread.
template <class RowAt>
inline Queries lay_out_queries(const AttentionArgs &args, Workspace s[kQueryBuffers], int64_t m, RowAt row) {
  if (has_int4_products(args))
    return {{m, args.dim, 0, nullptr, nullptr, nullptr}, quantize_rows_int16(s, m, args.dim, row),
            quantize_rows_int8(s[2], m, args.dim, args.scale * kLog2E, row)};
  if (args.has_int8_keys() && !args.uses_tiles())
    return {{m, args.dim, 0, nullptr, nullptr, nullptr}, quantize_rows_int16(s, m, args.dim, row), {}};
  return {lay_out_rows(s, m, args.dim, row), {}, {}};
}

// The keys of span number `span` that a task's tokens see, within the window if there is one.
struct SpanKeys {
  int64_t begin, from, end;  // where the span begins; the first key that is seen, and the end of those
  SpanKeys(const AttentionArgs &args, const AttentionTask &t, int64_t span)
      : begin(span * kSpan), from(args.window ? max64(begin, t.position + 1 - args.window) : begin),
        end(min64(begin + kSpan, t.position + t.tokens)) {}
};

// Where the partial results of a unit of work go: part + token * token_stride + head * stride.
struct PartialResults {
  float *part;
  int64_t token_stride, stride;
};

// A unit of work: one task's tokens and `heads` KV heads from g on, over one span or all spans of the task. q[i] has
// the query rows of KV head g + i: row t * group + h is token t and the head's query head h.
struct AttentionUnit {
  const AttentionTask &t;
  int64_t g, heads;
  const Queries *q;  // [heads]
};

}  // namespace
