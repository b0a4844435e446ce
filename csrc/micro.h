// The inner loops:
//
//   score_rows   s[r][j]  = sum over d of q[r][d] * k[d][j]    lanes are keys; d in order, one chain a score
//   value_rows   o[r][d] += sum over j of p[r][j] * v[j][d]    lanes are d; j in order, one chain an element
//
// Keys come as vectors of lanes, from the cache where it holds them so and else from a panel:
//
//   panel [D][kTile]   the keys of one tile, transposed and widened to float32, in L1
//
// A call handles R rows and C vectors in R * C registers. R and C change how many results are computed side
// by side, never the order of additions inside one, so any grouping of rows gives the same bits. So does
// widening first or on the way, for it is exact.
#pragma once

#include "ahead.h"
#include "common.h"

namespace octavo {

// Transposes the keys of vectors first..last-1 of a tile into the panel. Every place must be readable: lanes
// that are not keys hold some other row's place, and their scores are masked.
template <class V, class T>
void pack_keys(const T* keys, const int64_t* place, int first, int last, int dim, float* panel,
               Ahead<V>& ahead) {
  constexpr int W = V::width;
  for (int v = first; v < last; ++v) {
    const int64_t* row = place + v * W;
    float* out = panel + v * W;
    typename V::F x[W];
    for (int d = 0; d < dim; d += W) {
      ahead.step();
      if (d + W <= dim) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = V::load(keys + row[i] + d);
        V::transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) V::store(out + (d + i) * kTile, x[i]);
      } else {
        for (int i = 0; i < W; ++i) x[i] = V::load_part(keys + row[i] + d, dim - d);
        V::transpose(x);
        for (int i = 0; i < dim - d; ++i) V::store(out + (d + i) * kTile, x[i]);
      }
    }
  }
}

// Widens the lanes of vectors first..last-1 of a tile into the panel.
template <class V, class T>
void widen_keys(const T* const* lane, int64_t stride, int first, int last, int dim, float* panel) {
  for (int v = first; v < last; ++v)
    for (int d = 0; d < dim; ++d)
      V::store(panel + int64_t(d) * kTile + v * V::width, V::load(lane[v] + d * stride));
}

// Widens values from..to-1 of a tile into rows of padded(dim) floats, zeros at the end.
template <class V, class T>
void stage_values(const T* values, const int64_t* place, int from, int to, int dim, float* staged) {
  constexpr int W = V::width;
  for (int j = from; j < to; ++j) {
    const T* row = values + place[j];
    float* out = staged + int64_t(j) * padded(dim);
    int d = 0;
    for (; d + W <= dim; d += W) V::store(out + d, V::load(row + d));
    if (d < dim) V::store(out + d, V::load_part(row + d, dim - d));
  }
}

template <class V, int R, int C, class T>
void score_block(const float* q, int64_t q_stride, const T* const* lane, int64_t stride, int dim, float* s,
                 Ahead<V>& ahead) {
  typename V::F sum[R][C];
  const T* at[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) at[c] = lane[c];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = V::zero();
  for (int d = 0; d < dim; ++d) {
    ahead.step();
    typename V::F k[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) k[c] = V::load(at[c] + d * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename V::F x = V::set1(q[r * q_stride + d]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::fma(x, k[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) V::store(s + r * kTile + c * V::width, sum[r][c]);
}

// s [R][kTile] = scores of R rows against vectors first..last-1 of a tile; lane[v] + d * stride is vector v's
// dimension d.
template <class V, int R, class T>
void score_rows(const float* q, int64_t q_stride, const T* const* lane, int64_t stride, int dim, int first,
                int last, float* s, Ahead<V>& ahead) {
  int v = first;
  for (; v + V::cols <= last; v += V::cols)
    score_block<V, R, V::cols>(q, q_stride, lane + v, stride, dim, s + v * V::width, ahead);
  if constexpr (V::cols > 2) {
    for (; v + 2 <= last; v += 2)
      score_block<V, R, 2>(q, q_stride, lane + v, stride, dim, s + v * V::width, ahead);
  }
  for (; v < last; ++v)
    score_block<V, R, 1>(q, q_stride, lane + v, stride, dim, s + v * V::width, ahead);
}

template <class V, int R, int C, class T>
void value_block(const float* p, const T* value, const int64_t* place, int from, int to,
                 const float* rescale, float* o, int64_t o_stride, Ahead<V>& ahead) {
  typename V::F sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename V::F factor = V::set1(rescale[r]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = V::mul(V::load(o + r * o_stride + c * V::width), factor);
  }
  for (int j = from; j < to; ++j) {
    ahead.step();
    const T* row = value + place[j];
    typename V::F v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = V::load(row + c * V::width);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename V::F x = V::set1(p[r * kTile + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::fma(x, v[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) V::store(o + r * o_stride + c * V::width, sum[r][c]);
}

// o [R][dim] = o * rescale + p . values from..to-1 of the tile; value + place[j] is key j's row, in whole
// vectors.
template <class V, int R, class T>
void value_rows(const float* p, const T* value, const int64_t* place, int from, int to, int dim,
                const float* rescale, float* o, int64_t o_stride, Ahead<V>& ahead) {
  constexpr int W = V::width;
  int d = 0;
  for (; d + V::cols * W <= dim; d += V::cols * W)
    value_block<V, R, V::cols>(p, value + d, place, from, to, rescale, o + d, o_stride, ahead);
  if constexpr (V::cols > 2) {
    for (; d + 2 * W <= dim; d += 2 * W)
      value_block<V, R, 2>(p, value + d, place, from, to, rescale, o + d, o_stride, ahead);
  }
  for (; d < dim; d += W)
    value_block<V, R, 1>(p, value + d, place, from, to, rescale, o + d, o_stride, ahead);
}

}  // namespace octavo
