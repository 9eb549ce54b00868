// Memory that each thread keeps from call to call, so that a call allocates nothing once sizes have settled. Kernels
// ask for it by purpose: `workspace(kScores)->reserve<float>(count)`. What the leading thread reserves before it starts
// the team may be shared with the team by pointer.
#pragma once
#include <stdlib.h>

#include "runtime/vectors.h"

namespace {

// A buffer of one thread, 64-byte aligned. It grows and never shrinks; its contents do not survive growing.
class Workspace {
 public:
  // Returns memory for `count` entries of T and at least 64 bytes more (vector code may access them). It is not
  // cleared. Pointers that an earlier call returned remain valid only if the buffer did not grow; they point to the
  // same memory.
  template <class T>
  T *reserve(int64_t count) {
    size_t bytes = (size_t)round_up(count * (int64_t)sizeof(T) + 64, 64);
    if (bytes > size_) {
      free(data_);
      if (posix_memalign(&data_, 64, bytes)) abort();
      size_ = bytes;
    }
    return (T *)data_;
  }
  ~Workspace() { free(data_); }

 private:
  void *data_ = nullptr;
  size_t size_ = 0;
};

// What a thread's workspaces are used for. A purpose with a count is an array, which takes that many numbers; purposes
// that share a number are never in use at once.
enum WorkspaceSlot {
  // Products: rows of activations (2) and their quantized forms (3), tiles of weights (2), sums.
  kActivationRows = 0, kQuantizedRows = 2, kWeightTile = 5, kProductSums = 7,
  // Attention: tasks (2), scores, partial results, entries converted to bf16; tasks of many tokens.
  kAttentionTasks = 10, kScores = 8, kPartialResults = 9, kEntriesInBf16 = 14, kPrefillTasks = 17,
  // Latent attention: factors and corrections of a head that is folded; queries and results in the latent space.
  kFoldedFactors = 2, kFoldCorrections = 3, kFoldedQueries = 12, kMixedLatents = 13,
  // Layers: one head; a row after a norm that another follows; normed rows; the buffers of a layer; inputs of products
  // with many rows (panels, or int8: 3 each).
  kOneHead = 4, kAfterNormRow = 15, kNormedRows = 18, kSecondNormedRows = 19, kLayerRows = 20,
  kInputPanels = 16, kAttentionPanels = 21, kInnerPanels = 22, kInt8Rows = 20,
  // Experts: pairs (4), logits and ids of the router. A model's step: rows, and the largest logits per thread.
  kExpertPairs = 24, kRouterLogits = 28, kExpertIds = 29, kModelRows = 30, kArgmaxes = 31,
  // Sampling: maxima of lanes, sums by interval, ranked tokens, tokens in bands, sampled logits.
  kLaneMaxima = 15, kIntervalSums = 16, kRankedTokens = 17, kBandLogits = 18, kBandIds = 19, kSampledLogits = 23,
  // Layers in one call: tasks of attention (2) for each of kMaxAttentionPlans plans.
  kLayerTasks = 32,
};

// Plans of attention that layers in one call have at most.
constexpr int kMaxAttentionPlans = 8;

// Of recurrent layers: a block of a state; rows of a token's inputs, and pointers to them; rows between the parts of a
// mixer.
enum RecurrentSlot {
  kRecurrentState = kLayerTasks + 2 * kMaxAttentionPlans, kRecurrentInputs, kRecurrentPointers, kMixerRows,
  kInt4Firsts, kInt4Weights,  // attention over 4 bits: scores of first keys and ranges of a block; weights
  // Sparse attention: tasks, queries with heads as lanes, weights of heads, scores, and their order; gathered entries,
  // their scales and block tables.
  kIndexTasks, kIndexLanes, kIndexWeights, kIndexScores, kIndexOrders,
  kGatheredEntries, kGatheredScales, kGatheredTables,
  kHyperSums,  // hyper-connections: products and sums of squares of tokens
  kWorkspaces
};

// This thread's workspace for a purpose of WorkspaceSlot or RecurrentSlot; for a purpose with a count, a pointer to the first of that
// many workspaces.
inline Workspace *workspace(int slot) {
  static thread_local Workspace all[kWorkspaces];
  return &all[slot];
}

}  // namespace
