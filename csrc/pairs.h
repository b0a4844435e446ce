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

// R rows of `in`, times pairs first..last-1 of what fetch(i, y) gives as C vectors, into R rows of `out`: added
// to what these hold, times rescale, or, where that is null, instead of it.
template <class V, int R, int C, class Fetch>
void add_pairs(const bf16* in, int64_t in_stride, int first, int last, Fetch fetch, const float* rescale, float* out,
               int64_t out_stride, Ahead<V>& ahead) {
  typename V::F sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sum[r][c] =
          rescale ? V::mul(V::load(out + r * out_stride + c * V::width), V::set1(rescale[r])) : V::zero();
  for (int i = first; i < last; ++i) {
    ahead.step();
    typename V::P y[C];
    fetch(i, y);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename V::P x = V::set_pair(in + r * in_stride + i * 2);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::dot(x, y[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) V::store(out + r * out_stride + c * V::width, sum[r][c]);
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

  // Few rows take keys and values as they lie; for more they are paired once, into L1. The bits are the same.
  void load(const Places& at, int head, int rows, Ahead<V>&) {
    const CacheView& cache = *cache_;
    const bf16* key = reinterpret_cast<const bf16*>(cache.key) + head * cache.keys.head;
    const bf16* value = reinterpret_cast<const bf16*>(cache.value) + head * cache.values.head;
    for (int j = at.begin / 2 * 2; j < (at.end + 1) / 2 * 2; ++j)
      value_[j] = j < at.begin || j >= at.end ? zeros() : value + at.value[j];
    direct_ = rows <= kRowStep && cache.lanes() && cache.keys.dim == V::width && cache.dim % (V::cols * V::width) == 0;
    const int first = at.begin / V::width, last = (at.end + V::width - 1) / V::width;
    for (int v = first; v < last; ++v) {
      if (!cache.lanes()) {
        pair_rows(key, at.key + v * V::width, v);
        continue;
      }
      lane_[v] = key + at.lane[v * V::width / kAlign];
      if (!direct_) pair_lanes(lane_[v], v);
    }
    if (!direct_) pair_values(at);
  }

  template <int R>
  void score(const float* query, int64_t stride, int first, int last, float* s, Ahead<V>& ahead) {
    const bf16* q = reinterpret_cast<const bf16*>(query);
    int v = first;
    for (; v + V::cols <= last; v += V::cols) score_vectors<R, V::cols>(q, stride * 2, v, s, ahead);
    for (; v < last; ++v) score_vectors<R, 1>(q, stride * 2, v, s, ahead);
  }

  // Turns scores of vectors first..last-1 into weights in their place, which take half their room, and adds
  // these to the row's sums, lane by lane.
  void weigh(int first, int last, F top, F& sum, float* s) {
    bf16* p = reinterpret_cast<bf16*>(s);
    for (int v = first / 2 * 2; v < last; v += 2) {
      const F a = v < first ? V::zero() : V::short_exp(V::load(s + v * V::width), top);
      const F b = v + 1 < last ? V::short_exp(V::load(s + (v + 1) * V::width), top) : V::zero();
      const typename V::P weights = V::rounded(a, b);
      sum = V::dot(weights, V::ones(), sum);
      V::store_pairs(p + v * V::width, weights);
    }
  }

  // Weights beside a row's keys are zeros, and so are values beside the tile's, so whole pairs are added.
  template <int R>
  void add_values(const float* s, int from, int to, const float* rescale, float* o, int64_t stride,
                  Ahead<V>& ahead) {
    constexpr int W = V::width, C = V::cols;
    const bf16* p = reinterpret_cast<const bf16*>(s);
    const int first = from / 2, last = (to + 1) / 2, width = padded(cache_->dim);
    int d = 0;
    for (; d + C * W <= width; d += C * W) {
      const auto lying = [&](int j, typename V::P(&v)[C]) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c += 2)
          V::zip_two(value_[2 * j] + d + c * W, value_[2 * j + 1] + d + c * W, v[c], v[c + 1]);
      };
      const auto paired = [&](int j, typename V::P(&v)[C]) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = V::load_pairs(values_ + (j * width + d + c * W) * 2);
      };
      if (direct_) {
        add_pairs<V, R, C>(p, 2 * kTile, first, last, lying, rescale, o + d, stride, ahead);
      } else {
        add_pairs<V, R, C>(p, 2 * kTile, first, last, paired, rescale, o + d, stride, ahead);
      }
    }
    for (; d < width; d += W) {
      const auto paired = [&](int j, typename V::P(&v)[1]) { v[0] = V::load_pairs(values_ + (j * width + d) * 2); };
      add_pairs<V, R, 1>(p, 2 * kTile, first, last, paired, rescale, o + d, stride, ahead);
    }
  }

 private:
  static const bf16* zeros() {
    static constexpr bf16 row[kMaxDim] = {};
    return row;
  }

  template <int R, int C>
  void score_vectors(const bf16* q, int64_t stride, int v, float* s, Ahead<V>& ahead) {
    const int pairs = (cache_->dim + 1) / 2;
    if (direct_) {
      const auto lying = [&](int i, typename V::P(&k)[C]) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) k[c] = V::zip_halves(lane_[v + c] + i * 2 * V::width);
      };
      return add_pairs<V, R, C>(q, stride, 0, pairs, lying, nullptr, s + v * V::width, kTile, ahead);
    }
    const auto paired = [&](int i, typename V::P(&k)[C]) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) k[c] = V::load_pairs(keys_ + (i * kTile + (v + c) * V::width) * 2);
    };
    add_pairs<V, R, C>(q, stride, 0, pairs, paired, nullptr, s + v * V::width, kTile, ahead);
  }

  // Keys that lie in lanes, into vector v of the tile.
  void pair_lanes(const bf16* lane, int v) {
    const int dim = cache_->dim;
    const int64_t stride = cache_->keys.dim;
    bf16* out = keys_ + v * V::width * 2;
    for (int d = 0; d < dim; d += 2, out += kTile * 2) {
      const bf16* next = d + 1 < dim ? lane + (d + 1) * stride : zeros();
      V::store_pairs(out, V::zip(lane + d * stride, next));
    }
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

  void pair_values(const Places& at) {
    constexpr int W = V::width;
    const int dim = cache_->dim;
    for (int j = at.begin / 2 * 2; j < at.end; j += 2) {
      const bf16 *a = value_[j], *b = value_[j + 1];
      bf16* out = values_ + int64_t(j) * padded(dim);
      int d = 0;
      for (; d + 2 * W <= dim; d += 2 * W) {
        typename V::P first, second;
        V::zip_two(a + d, b + d, first, second);
        V::store_pairs(out + d * 2, first);
        V::store_pairs(out + (d + W) * 2, second);
      }
      for (; d < dim; d += W) {
        const int count = dim - d < W ? dim - d : W;
        V::store_pairs(out + d * 2, V::zip_part(a + d, b + d, count));
      }
    }
  }

  const CacheView* cache_;
  bf16 *keys_, *values_;                // paired
  bool direct_;                         // not paired: read as they lie
  const bf16* lane_[kTile / V::width];  // a head's keys, vector by vector
  const bf16* value_[kTile];            // and its values; zeros beside those that are read
};

}  // namespace octavo
