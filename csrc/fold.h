// Partial results: where they lie, how two become one, and how the last becomes output.
//
//   partials   [strip][split][token][query head][padded(D) + kAlign]   sum of weights * value, then the
//                                                                      largest score and the sum of weights
#pragma once

#include <cfloat>
#include <cmath>

#include "common.h"
#include "math.h"

namespace octavo {

static inline float* partial_row(const Call& call, const Strip& strip, int split, int token, int head) {
  const int64_t tokens = strip.token_end - strip.token_begin;
  const int64_t place = int64_t(split - strip.split_begin) * tokens + token - strip.token_begin;
  return call.partials + strip.partial + (place * call.query_heads + head) * partial_floats(call.cache.dim);
}

// total (+) part, where each is a sum o, a largest score and a sum of weights.
template <class V>
void fold(float* total, float& total_top, float& total_sum, const float* part, float top, float sum,
          int width) {
  const float best = total_top > top ? total_top : top;
  alignas(64) float factor[kAlign] = {total_top - best, top - best};
  V::store(factor, exp<V>(V::load(factor)));
  const typename V::F keep = V::set1(factor[0]), add = V::set1(factor[1]);
  for (int d = 0; d < width; d += V::width)
    V::store(total + d, V::fma(V::load(part + d), add, V::mul(V::load(total + d), keep)));
  total_sum = total_sum * factor[0] + sum * factor[1];
  total_top = best;
}

template <class V, class T>
void write_row(T* out, const float* total, float sum, int dim) {
  const typename V::F divisor = V::set1(sum);
  int d = 0;
  for (; d + V::width <= dim; d += V::width) V::store(out + d, V::div(V::load(total + d), divisor));
  if (d < dim) {
    T last[V::width];
    V::store(last, V::div(V::load(total + d), divisor));
    for (int i = 0; d + i < dim; ++i) out[d + i] = last[i];
  }
}

// Adds the sink, divides, and writes the row's output and lse. Overwrites total.
template <class V>
void finish_row(const Call& call, int token, int head, float* total, float top, float sum) {
  if (call.sinks) {
    const float sink = call.sinks[head], best = top > sink ? top : sink;
    alignas(64) float factor[kAlign] = {top - best, sink - best};
    V::store(factor, exp<V>(V::load(factor)));
    sum = sum * factor[0] + factor[1];
    top = best;
    const typename V::F keep = V::set1(factor[0]);
    for (int d = 0; d < padded(call.cache.dim); d += V::width)
      V::store(total + d, V::mul(V::load(total + d), keep));
  }
  const int64_t row = int64_t(token) * call.query_heads + head;
  if (call.lse) call.lse[row] = top + logf(sum);
  const int64_t at = row * call.cache.dim;
  switch (call.query_dtype) {
    case DType::f32: write_row<V>(reinterpret_cast<float*>(call.out) + at, total, sum, call.cache.dim); break;
    case DType::bf16: write_row<V>(reinterpret_cast<bf16*>(call.out) + at, total, sum, call.cache.dim); break;
    default: write_row<V>(reinterpret_cast<f16*>(call.out) + at, total, sum, call.cache.dim); break;
  }
}

// Folds a strip's partials in order of position and writes its rows. total: padded(dim) floats.
template <class V>
void merge(const Call& call, const Strip& strip, float* total) {
  const int width = padded(call.cache.dim);
  for (int token = strip.token_begin; token < strip.token_end; ++token) {
    for (int head = 0; head < call.query_heads; ++head) {
      float top = -FLT_MAX, sum = 0;
      for (int d = 0; d < width; ++d) total[d] = 0;
      for (int split = strip.split_begin; split < strip.split_end; ++split) {
        const float* part = partial_row(call, strip, split, token, head);
        fold<V>(total, top, sum, part, part[width], part[width + 1], width);
      }
      finish_row<V>(call, token, head, total, top, sum);
    }
  }
}

}  // namespace octavo
