// The loops over pairs of bfloat16 numbers, for a cache that holds bfloat16 and a processor that multiplies it:
//
//   scores   s[r][j]  = sum over pairs of dimensions of q[r][2i] k[j][2i] + q[r][2i + 1] k[j][2i + 1]
//   values   o[r][d] += sum over pairs of keys of       p[r][2j] v[2j][d] + p[r][2j + 1] v[2j + 1][d]
//
//   keys     [dim / 2][kTile][2]        one tile of one head, in L1
//   values   [kTile / 2][padded(dim)][2]
//   queries  [rows][dim] in the scratch of float rows; weights [rows][kTile] in place of their scores
//
// Queries (times scale) and weights are rounded to bfloat16, products are exact, sums are float32, and a row's
// sum of weights is that of the rounded ones. The order of additions inside a result is that of the pairs,
// whatever the rows beside it; micro.h has the same loops one number at a time.
#pragma once

#include "ahead.h"
#include "common.h"

namespace octavo {

template <class V, int R, int C>
void score_pairs_block(const bf16* q, int64_t q_stride, const bf16* keys, int pairs, float* s, Ahead<V>& ahead) {
  typename V::F sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = V::zero();
  for (int i = 0; i < pairs; ++i) {
    ahead.step();
    typename V::P k[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) k[c] = V::load_pairs(keys + (int64_t(i) * kTile + c * V::width) * 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename V::P x = V::set_pair(q + r * q_stride + i * 2);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::dot(x, k[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) V::store(s + r * kTile + c * V::width, sum[r][c]);
}

// values: of the first pair, at the block's first dimension.
template <class V, int R, int C>
void value_pairs_block(const bf16* p, const bf16* values, int64_t width, int first, int last,
                       const float* rescale, float* o, int64_t o_stride, Ahead<V>& ahead) {
  typename V::F sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename V::F factor = V::set1(rescale[r]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = V::mul(V::load(o + r * o_stride + c * V::width), factor);
  }
  for (int j = first; j < last; ++j) {
    ahead.step();
    typename V::P v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = V::load_pairs(values + (j * width + c * V::width) * 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename V::P x = V::set_pair(p + r * (2 * kTile) + j * 2);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::dot(x, v[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) V::store(o + r * o_stride + c * V::width, sum[r][c]);
}

// Takes the place of Floats (tile.h) in TaskRunner.
template <class V>
class Pairs {
 public:
  using F = typename V::F;
  static constexpr bool scales = false;
  static constexpr int steps(int dim) { return (dim + 1) / 2 + kTile / 2; }

  void init(const CacheView& cache, float* keys, float* values) {
    cache_ = &cache;
    keys_ = reinterpret_cast<bf16*>(keys), values_ = reinterpret_cast<bf16*>(values);
  }

  // A row of padded(dim) floats' room takes padded(dim) numbers, zeros at the end.
  template <class T>
  void load_query(const T* in, float by, float* row) {
    bf16* out = reinterpret_cast<bf16*>(row);
    const F scale = V::set1(by);
    const int dim = cache_->dim;
    int d = 0;
    for (; d + V::width <= dim; d += V::width) V::store_rounded(out + d, V::mul(V::load(in + d), scale));
    if (d < dim) V::store_rounded(out + d, V::mul(V::load_part(in + d, dim - d), scale));
  }

  void load(const Places& at, int head, int, Ahead<V>&) {
    const CacheView& cache = *cache_;
    const bf16* key = reinterpret_cast<const bf16*>(cache.key) + head * cache.keys.head;
    const int first = at.begin / V::width, last = (at.end + V::width - 1) / V::width;
    for (int v = first; v < last; ++v) {
      if (cache.lanes()) {
        pair_lanes(key + at.lane[v * V::width / kAlign] + v * V::width % kAlign, v);
      } else {
        pair_rows(key, at.key + v * V::width, v);
      }
    }
    pair_values(reinterpret_cast<const bf16*>(cache.value) + head * cache.values.head, at);
  }

  template <int R>
  void score(const float* query, int64_t stride, int first, int last, float* s, Ahead<V>& ahead) {
    const bf16* q = reinterpret_cast<const bf16*>(query);
    const int pairs = (cache_->dim + 1) / 2;
    int v = first;
    for (; v + V::cols <= last; v += V::cols)
      score_pairs_block<V, R, V::cols>(q, stride * 2, keys_ + v * V::width * 2, pairs, s + v * V::width, ahead);
    for (; v < last; ++v)
      score_pairs_block<V, R, 1>(q, stride * 2, keys_ + v * V::width * 2, pairs, s + v * V::width, ahead);
  }

  F weight(F shifted_score) { return V::rounded(V::short_exp(shifted_score)); }

  // In place: a row's scores before vector v have been read, and its weights take half their room.
  void store_weights(float* s, int v, F weights) {
    V::store_rounded(reinterpret_cast<bf16*>(s) + v * V::width, weights);
  }

  // Weights beside a row's keys are zeros, and so are values beside the tile's, so whole pairs are added.
  template <int R>
  void add_values(const float* s, int from, int to, const float* rescale, float* o, int64_t stride,
                  Ahead<V>& ahead) {
    const bf16* p = reinterpret_cast<const bf16*>(s);
    const int first = from / 2, last = (to + 1) / 2, width = padded(cache_->dim);
    int d = 0;
    for (; d + V::cols * V::width <= width; d += V::cols * V::width)
      value_pairs_block<V, R, V::cols>(p, values_ + d * 2, width, first, last, rescale, o + d, stride, ahead);
    for (; d < width; d += V::width)
      value_pairs_block<V, R, 1>(p, values_ + d * 2, width, first, last, rescale, o + d, stride, ahead);
  }

 private:
  // Keys that lie in lanes, into vector v of the tile.
  void pair_lanes(const bf16* lane, int v) {
    const int64_t stride = cache_->keys.dim;
    bf16* out = keys_ + v * V::width * 2;
    for (int d = 0; d < cache_->dim; d += 2, out += kTile * 2)
      V::store_pairs(out, V::zip(lane + d * stride, d + 1 < cache_->dim ? lane + (d + 1) * stride : nullptr));
  }

  // Keys that lie as rows, where pairs of dimensions are side by side: transposed as such.
  void pair_rows(const bf16* key, const int64_t* place, int v) {
    constexpr int W = V::width;
    const int dim = cache_->dim;
    for (int d = 0; d < dim; d += 2 * W) {
      const int count = dim - d < 2 * W ? dim - d : 2 * W;
      F x[W];
      for (int i = 0; i < W; ++i)
        x[i] = V::as_floats(count == 2 * W ? V::load_pairs(key + place[i] + d)
                                           : V::load_pairs_part(key + place[i] + d, count));
      V::transpose(x);
      bf16* out = keys_ + (int64_t(d / 2) * kTile + v * W) * 2;
      for (int i = 0; i < (count + 1) / 2; ++i) V::store_pairs(out + i * kTile * 2, V::as_pairs(x[i]));
    }
  }

  void pair_values(const bf16* value, const Places& at) {
    constexpr int W = V::width;
    const int dim = cache_->dim;
    for (int j = at.begin / 2 * 2; j < at.end; j += 2) {
      const bf16* a = j >= at.begin ? value + at.value[j] : nullptr;
      const bf16* b = j + 1 < at.end ? value + at.value[j + 1] : nullptr;
      bf16* out = values_ + int64_t(j / 2) * padded(dim) * 2;
      int d = 0;
      for (; d + W <= dim; d += W) V::store_pairs(out + d * 2, V::zip(a ? a + d : a, b ? b + d : b));
      if (d < dim) V::store_pairs(out + d * 2, V::zip_part(a ? a + d : a, b ? b + d : b, dim - d));
    }
  }

  const CacheView* cache_;
  bf16 *keys_, *values_;
};

}  // namespace octavo
