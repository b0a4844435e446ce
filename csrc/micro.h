// The inner loops, on float32 in L1:
//
//   panel [D][kTile]     keys of one tile, transposed: lanes are keys
//   score_rows           s[r][j]  = sum over d of q[r][d] * panel[d][j]    d in order, one chain a score
//   value_rows           o[r][d] += sum over j of p[r][j] * v[j][d]        j in order, one chain an element
//
// A call handles R rows and C vectors in R * C registers. R and C change how many results are computed side
// by side, never the order of additions inside one, so any grouping of rows gives the same bits.
#pragma once

#include "common.h"

namespace octavo {

// Fetches the next tile while this one is computed. Memory keeps some tens of lines on their way and no more,
// so the requests are spread over all the phases of a tile; and they go up in address, all heads of a token
// before the next token, because the hardware's own prefetcher then joins in.
class Ahead {
 public:
  void start(const char* key, const char* value, const int64_t* place, int bytes,
             int64_t part_stride, int parts) {
    key_ = Cursor{key, 0, 0};
    value_ = Cursor{value, 0, 0};
    place_ = place, bytes_ = bytes, part_stride_ = part_stride, parts_ = parts, on_ = true;
  }
  void stop() { on_ = false; }
  bool on() const { return on_; }
  // One head's row of one token.
  __attribute__((always_inline)) void fetch_key() { fetch(key_); }
  __attribute__((always_inline)) void fetch_value() { fetch(value_); }

 private:
  struct Cursor {
    const char* base;
    int token, part;
  };
  __attribute__((always_inline)) void fetch(Cursor& at) {
    if (at.token == kTile) return;
    const char* row = at.base + place_[at.token] + at.part * part_stride_;
    for (int i = 0; i < bytes_; i += 64) __builtin_prefetch(row + i);
    if (++at.part == parts_) at.part = 0, ++at.token;
  }

  Cursor key_, value_;
  const int64_t* place_;  // kTile of them, in bytes
  int64_t part_stride_;   // from head to head, in bytes
  int bytes_, parts_;     // of one head; heads
  bool on_ = false;
};

// Transposes the keys of vectors first..last-1 of a tile into the panel. Every place must be readable: lanes
// that are not keys hold some other row's place, and their scores are masked.
template <class V, class T>
void pack_keys(const char* base, const int64_t* place, int first, int last, int dim, float* panel,
               Ahead& ahead) {
  constexpr int W = V::width;
  const T* keys = reinterpret_cast<const T*>(base);
  const int chunks = (dim + W - 1) / W, share = (W + chunks - 1) / chunks;  // of a vector's keys per chunk
  for (int v = first; v < last; ++v) {
    const int64_t* row = place + v * W;
    float* out = panel + v * W;
    typename V::F x[W];
    for (int c = 0; c < chunks; ++c) {
      const int d = c * W;
      if (ahead.on())
        for (int j = c * share; j < W && j < (c + 1) * share; ++j) ahead.fetch_value();
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

// Widens values from..to-1 of a tile into rows of padded(dim) floats, zeros at the end.
template <class V, class T>
void stage_values(const char* base, const int64_t* offset, int from, int to, int dim, float* staged) {
  constexpr int W = V::width;
  const T* values = reinterpret_cast<const T*>(base);
  for (int j = from; j < to; ++j) {
    const T* row = values + offset[j];
    float* out = staged + int64_t(j) * padded(dim);
    int d = 0;
    for (; d + W <= dim; d += W) V::store(out + d, V::load(row + d));
    if (d < dim) V::store(out + d, V::load_part(row + d, dim - d));
  }
}

template <class V, int R, int C>
void score_block(const float* q, int64_t q_stride, const float* panel, int dim, float* s,
                 Ahead& ahead) {
  typename V::F sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = V::zero();
  for (int d = 0; d < dim; ++d) {
    if (ahead.on() && d % 2 == 0 && d < kTile) ahead.fetch_key();
    typename V::F k[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) k[c] = V::load(panel + int64_t(d) * kTile + c * V::width);
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

// s [R][kTile] = scores of R rows against the panel's vectors first..last-1.
template <class V, int R>
void score_rows(const float* q, int64_t q_stride, const float* panel, int dim, int first, int last, float* s,
                Ahead& ahead) {
  int v = first;
  for (; v + V::cols <= last; v += V::cols)
    score_block<V, R, V::cols>(q, q_stride, panel + v * V::width, dim, s + v * V::width, ahead);
  if constexpr (V::cols > 2) {
    for (; v + 2 <= last; v += 2)
      score_block<V, R, 2>(q, q_stride, panel + v * V::width, dim, s + v * V::width, ahead);
  }
  for (; v < last; ++v) score_block<V, R, 1>(q, q_stride, panel + v * V::width, dim, s + v * V::width, ahead);
}

template <class V, int R, int C>
void value_block(const float* p, const float* const* value, int from, int to, int d, const float* rescale,
                 float* o, int64_t o_stride, Ahead& ahead) {
  typename V::F sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename V::F factor = V::set1(rescale[r]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = V::mul(V::load(o + r * o_stride + d + c * V::width), factor);
  }
  for (int j = from; j < to; ++j) {
    if (ahead.on() && j % 2) ahead.fetch_key();
    const float* row = value[j] + d;
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
    for (int c = 0; c < C; ++c) V::store(o + r * o_stride + d + c * V::width, sum[r][c]);
}

// o [R][dim] = o * rescale + p . values from..to-1 of the tile.
template <class V, int R>
void value_rows(const float* p, const float* const* value, int from, int to, int dim, const float* rescale,
                float* o, int64_t o_stride, Ahead& ahead) {
  constexpr int W = V::width;
  int d = 0;
  for (; d + V::cols * W <= dim; d += V::cols * W)
    value_block<V, R, V::cols>(p, value, from, to, d, rescale, o, o_stride, ahead);
  if constexpr (V::cols > 2) {
    for (; d + 2 * W <= dim; d += 2 * W)
      value_block<V, R, 2>(p, value, from, to, d, rescale, o, o_stride, ahead);
  }
  for (; d < dim; d += W) value_block<V, R, 1>(p, value, from, to, d, rescale, o, o_stride, ahead);
}

}  // namespace octavo
