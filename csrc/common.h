// What the planner, the kernels and the Python module share: sizes, dtypes and plain structs.
//
//   Plan     which work one step's batch implies    strips (query rows) and tasks (strips x heads x splits)
//   Call     one layer's tensors and options        pointers and strides, in elements
//   Kernels  one instruction set's entry points
//
// Positions are cut at multiples of kSplit, and inside a split at multiples of kTile. A query row's partial
// result over a split depends on that row and those positions alone, and partials are folded in order of
// position. So the bits of a row depend neither on the other rows, nor on chunking, threads or block ids.
//
// Files named *_avx*.cpp are compiled for those sets. A function that they share with the
// rest must be a template over the vector struct, or the linker could keep the copy with the newer
// instructions for everybody. Hence no inline functions and no standard containers in kernel headers.
// The functions that return a set's kernels run on every machine, so they return constants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kTile = 64;        // keys scored at once: a panel of D x kTile floats stays in L1
constexpr int kSplit = 512;      // positions per partial result
constexpr int kMaxDim = 256;     // head_dim
constexpr int kRowStep = 6;      // query rows that share registers; see micro.h
constexpr int kBatchRows = 48;   // query rows whose weights over a tile are kept at once
constexpr int kStripRows = 96;   // query rows per KV head that a strip aims at
constexpr int kShareRows = 128;  // most query rows per KV head that a shared task holds
constexpr int kFetchRows = 64;   // query rows per KV head up to which the next tile is fetched ahead
constexpr int kAlign = 16;       // floats to which rows are padded in scratch memory, and lanes in caches

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

constexpr int item_size(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2; }

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Where [num_blocks, block_size, heads, dim] lies, in elements of its dtype.
struct Strides {
  int64_t block = 0, slot = 0, head = 0, dim = 0;
};

// K and V of one layer. Values have a dense last axis. Keys have one too, or else they lie in lanes: the slots
// of a block side by side for each dimension, ready for vectors, and block_size is a multiple of kAlign.
// Scales, for i8 only, are [num_blocks, block_size, heads], both with the same strides.
struct CacheView {
  char* key = nullptr;
  char* value = nullptr;
  float* key_scale = nullptr;
  float* value_scale = nullptr;
  DType dtype = DType::f32;
  int64_t num_blocks = 0;
  int block_size = 0, heads = 0, dim = 0;
  Strides keys, values, scales;

  bool lanes() const { return keys.slot == 1 && block_size % kAlign == 0 && (keys.dim != 1 || dim == 1); }
};

// Consecutive queries of one sequence.
struct Strip {
  int sequence;
  int token_begin, token_end;    // rows of the query tensor
  int position;                  // of token_begin
  int split_begin, split_end;    // that any of its queries sees
  int tasks;                     // that contribute; 0 where one task does it all
  int64_t partial;               // first partial row, [split][token][query head]; unused where tasks is 0
};

// Some strips over some KV heads and splits. More than one strip: they share these positions' blocks.
struct Task {
  int member_begin, member_end;  // into StepPlan::members, which index strips
  int head_begin, head_end;
  int split_begin, split_end;
  bool whole;                    // covers all splits of its one strip, and writes the output itself
  int64_t cost;
};

struct BatchView {
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* kv_len;
  int sequences, columns, tokens;
};

struct Call {
  BatchView batch;
  CacheView cache;
  const Strip* strips;
  const int* members;
  const char* query;
  char* out;
  float* lse;          // [tokens, query heads] or null
  DType query_dtype;   // of query and out
  int64_t query_token_stride, query_head_stride;  // out is dense
  int query_heads, group, window;                 // window: INT32_MAX where there is none
  float scale, softcap;                           // softcap 0: none
  const float* sinks;  // [query heads] or null
  const float* alibi;  // [query heads] or null
  float* partials;
};

// New K and V rows on their way into the cache; rotary where cos is set.
struct WriteCall {
  CacheView cache;
  char* query;  // rotated in place; null without rotary
  char* key;
  char* value;
  DType dtype;  // of query, key and value
  int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
  int64_t value_token_stride, value_head_stride;
  int query_heads;
  const float* cos;  // [tokens, dim / 2], or, with positions, a row per position
  const float* sin;
  const int64_t* positions;  // [tokens] or null
  const int64_t* slots;
};

// A partial row in memory: dim floats padded, then maximum and sum.
constexpr int padded(int dim) { return (dim + kAlign - 1) / kAlign * kAlign; }
constexpr int partial_floats(int dim) { return padded(dim) + kAlign; }

struct Kernels {
  const char* name;
  void (*attend)(const Call&, const Task&, float* scratch);
  void (*merge)(const Call&, const Strip&, float* scratch);
  void (*write)(const WriteCall&, int64_t begin, int64_t end);
};

// Scratch floats that attend needs for a task of `rows` query rows over all its heads.
constexpr int64_t scratch_floats(int64_t rows, int dim) {
  return int64_t(kTile) * padded(dim) * 2 + rows * (int64_t(padded(dim)) * 3 + 3 * kAlign) + 16 * kTile;
}

const Kernels* kernels_baseline();
const Kernels* kernels_avx2();    // null where not compiled in
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();

}  // namespace octavo
