// The memory-bound pieces of a step besides attention: norms, SwiGLU and sampling over the vocabulary.
//
//   OpsKernels   one instruction set's entry points, templates over the vector struct (norm.h, weigh.h)
//   Ops          cuts rows among threads; see sample.h for what sampling decides
//
// A row's result depends on that row alone. Of norms and of sampling the bits do not depend on the
// instruction set either: sums go over kLanes lanes (or are integers), and nothing is fused.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.h"

namespace octavo {

constexpr int kLanes = 32;      // partial sums of a norm
constexpr int kChunk = 1024;    // logits per group of sums and maxima
constexpr int kMaxima = 16;     // maxima kept per chunk: of every sixteenth logit

// Rows of `dim` elements at [outer][inner] with strides in elements; the last axis is dense.
struct Rows {
  char* data;
  int64_t outer_stride, inner_stride;
};

struct NormCall {
  Rows x, out;          // out may be x
  const char* delta;    // dense [outer, dim], added to x in place first; null: none. Then inner is 1
  const char* weight;   // [dim]
  DType dtype;          // of all four
  int64_t outer, inner, dim;
  float eps;
};

struct SwigluCall {
  const char* gate;     // [rows, dim] with row stride; likewise up and out, which may be gate
  const char* up;
  char* out;
  DType dtype;
  int64_t rows, dim, gate_stride, up_stride, out_stride;
};

// What one look at a row of logits finds.
struct Scan {
  float max;
  bool bad;  // NaN or +infinity among the logits, or nothing above -infinity
};

struct OpsKernels {
  const char* name;
  void (*norm)(const NormCall&, int64_t begin, int64_t end);      // outer rows
  void (*swiglu)(const SwigluCall&, int64_t begin, int64_t end);  // rows
  // maxima: kMaxima floats per chunk begun.
  Scan (*scan)(const float* logits, int64_t size, float* maxima);
  // Sums of weights per chunk, in units of 2^-40; see weigh.h.
  void (*chunk_sums)(const float* logits, int64_t size, float max, float temperature, int64_t* sums);
  void (*weights)(const float* logits, int64_t size, float max, float temperature, int64_t* weights);
  // Indices (+ first) of logits >= floor, ascending; returns how many. ids has room for size.
  int64_t (*gather)(const float* logits, int64_t size, float floor, int32_t first, int32_t* ids);
};

const OpsKernels* ops_baseline();
const OpsKernels* ops_avx2();    // null where not compiled in
const OpsKernels* ops_avx512();

struct Draw {
  const float* logits;
  float temperature;  // 0: the likeliest
  int64_t top_k;      // 0: all
  double top_p, min_p;
  uint64_t seed, branch, position;
};

// Names of the instruction sets that the operations have here, fastest first.
std::vector<std::string> ops_isas();

class Ops {
 public:
  explicit Ops(const std::string& isa);  // throws std::invalid_argument where it is not available

  const char* isa() const { return kernels_->name; }
  void norm(const NormCall& call, int threads) const;
  void swiglu(const SwigluCall& call, int threads) const;
  // One token id per draw; -1 where the row's logits are bad (see Scan).
  std::vector<int64_t> sample(const std::vector<Draw>& draws, int64_t vocab, int threads) const;
  // The tokens that a draw chooses among, ascending, with weights above 0; returns how many, or -1.
  int64_t candidates(const Draw& draw, int64_t vocab, int64_t* ids, int64_t* weights) const;

 private:
  const OpsKernels* kernels_;
};

}  // namespace octavo
