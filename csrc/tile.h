// A tile of up to kTile positions: where its keys and values lie, and the loops over float32 numbers.
#pragma once

#include "ahead.h"
#include "common.h"
#include "math.h"
#include "micro.h"

namespace octavo {

// Keys begin..end-1 of a tile are read. Places are offsets in elements of one layer, without the head.
struct Places {
  int begin, end;
  int64_t key[kTile], value[kTile], scale[kTile];               // key: where the cache holds rows
  int64_t lane[kTile / kAlign], scale_lane[kTile / kAlign];     // where it holds lanes, of each kAlign of them
};

// Lanes beside begin..end-1 get the place of a key, to be readable.
template <class V>
void find_places(const CacheView& cache, const int32_t* table, int tile, Places& at) {
  const bool keys = !cache.lanes();
  const int size = cache.block_size;
  int logical = (tile + at.begin) / size, offset = (tile + at.begin) % size;
  for (int j = at.begin; j < at.end; ++logical, offset = 0) {
    const int run = size - offset < at.end - j ? size - offset : at.end - j;
    const int64_t block = table[logical];
    const int64_t value = block * cache.values.block + offset * cache.values.slot;
    for (int i = 0; i < run; ++i) at.value[j + i] = value + i * cache.values.slot;
    if (keys) {
      const int64_t key = block * cache.keys.block + offset * cache.keys.slot;
      for (int i = 0; i < run; ++i) at.key[j + i] = key + i * cache.keys.slot;
    }
    if (cache.dtype == DType::i8) {
      const int64_t scale = block * cache.scales.block + offset * cache.scales.slot;
      for (int i = 0; i < run; ++i) at.scale[j + i] = scale + i * cache.scales.slot;
    }
    j += run;
  }
  if (keys) {
    for (int j = 0; j < at.begin; ++j) at.key[j] = at.key[at.begin];
    for (int j = at.end; j < kTile; ++j) at.key[j] = at.key[at.begin];
  }
  if (size % kAlign) return;
  for (int j = at.begin / kAlign * kAlign; j < at.end; j += kAlign) {
    const int64_t block = table[(tile + j) / size], offset_in = (tile + j) % size;
    at.lane[j / kAlign] = block * cache.keys.block + offset_in;
    at.scale_lane[j / kAlign] = block * cache.scales.block + offset_in;
  }
}

// Queries, weights and sums in float32; keys and values of any dtype, as they lie where the loops can take
// them so, else widened to float32 first. Both give the same bits.
template <class V>
class Floats {
 public:
  using F = typename V::F;
  static constexpr bool scales = true;
  static constexpr int steps(int dim) { return dim + kTile; }  // calls of Ahead::step by a group of rows

  void init(const CacheView& cache, float* panel, float* staged) {
    cache_ = &cache, panel_ = panel, staged_ = staged;
    for (int j = 0; j < kTile; ++j) staged_place_[j] = int64_t(j) * padded(cache.dim);
    // Lanes beside a tile's keys have scores and weights too, of no effect but read.
    for (int j = 0; j < kTile; ++j) key_scale_[j] = value_scale_[j] = 0;
  }

  template <class T>
  void load_query(const T* in, float by, float* out) {
    const F scale = V::set1(by);
    const int dim = cache_->dim;
    int d = 0;
    for (; d + V::width <= dim; d += V::width) V::store(out + d, V::mul(V::load(in + d), scale));
    if (d < dim) V::store(out + d, V::mul(V::load_part(in + d, dim - d), scale));
  }

  // Readies the keys and values of one KV head for score and add_values, of `rows` query rows.
  void load(const Places& at, int head, int rows, Ahead<V>& ahead) {
    switch (cache_->dtype) {
      case DType::f32: load_as<float>(at, head, rows, ahead); break;
      case DType::bf16: load_as<bf16>(at, head, rows, ahead); break;
      case DType::f16: load_as<f16>(at, head, rows, ahead); break;
      case DType::i8: load_as<int8_t>(at, head, rows, ahead); load_scales(at, head); break;
    }
  }

  // s [R][kTile] = scores of R rows against vectors first..last-1 of the tile.
  template <int R>
  void score(const float* query, int64_t stride, int first, int last, float* s, Ahead<V>& ahead) {
    switch (key_stored_ ? cache_->dtype : DType::f32) {
      case DType::f32: return score_as<R, float>(query, stride, first, last, s, ahead);
      case DType::bf16: return score_as<R, bf16>(query, stride, first, last, s, ahead);
      case DType::f16: return score_as<R, f16>(query, stride, first, last, s, ahead);
      case DType::i8: return score_as<R, int8_t>(query, stride, first, last, s, ahead);
    }
  }

  // Turns scores of vectors first..last-1 into weights and adds them to the row's sums, lane by lane.
  void weigh(int first, int last, F top, F& sum, float* s) {
    int v = first;
    for (; v + 4 <= last; v += 4) weigh_vectors<4>(v, top, sum, s);
    for (; v < last; ++v) weigh_vectors<1>(v, top, sum, s);
  }

  // o [R][dim] = o * rescale + weights . values from..to-1.
  template <int R>
  void add_values(const float* s, int from, int to, const float* rescale, float* o, int64_t stride,
                  Ahead<V>& ahead) {
    switch (value_stored_ ? cache_->dtype : DType::f32) {
      case DType::f32: return add_as<R, float>(s, from, to, rescale, o, stride, ahead);
      case DType::bf16: return add_as<R, bf16>(s, from, to, rescale, o, stride, ahead);
      case DType::f16: return add_as<R, f16>(s, from, to, rescale, o, stride, ahead);
      case DType::i8: return add_as<R, int8_t>(s, from, to, rescale, o, stride, ahead);
    }
  }

  // Scores of an int8 cache's keys become those of the numbers they stand for.
  F scaled(F scores, int v) { return V::mul(scores, V::load(key_scale_ + v * V::width)); }

 private:
  template <class T>
  void load_as(const Places& at, int head, int rows, Ahead<V>& ahead) {
    constexpr int W = V::width;
    const CacheView& cache = *cache_;
    const int first = at.begin / W, last = (at.end + W - 1) / W;
    const T* key = reinterpret_cast<const T*>(cache.key) + head * cache.keys.head;
    const T* value = reinterpret_cast<const T*>(cache.value) + head * cache.values.head;
    // Widening once pays where several groups of rows follow.
    const bool as_stored = sizeof(T) == sizeof(float) || rows <= kRowStep;
    key_stored_ = cache.lanes() && as_stored;
    if (cache.lanes()) {
      for (int v = first; v < last; ++v) lane_[v] = key + at.lane[v * W / kAlign] + v * W % kAlign;
      lane_stride_ = cache.keys.dim;
      if (!as_stored)
        widen_keys<V, T>(reinterpret_cast<const T* const*>(lane_), lane_stride_, first, last, cache.dim, panel_);
    } else {
      pack_keys<V, T>(key, at.key, first, last, cache.dim, panel_, ahead);
    }
    if (!key_stored_) {
      for (int v = first; v < last; ++v) lane_[v] = panel_ + v * W;
      lane_stride_ = kTile;
    }
    value_stored_ = as_stored && cache.dim % W == 0;
    value_ = value, value_place_ = at.value;
    if (!value_stored_) {
      stage_values<V, T>(value, at.value, at.begin, at.end, cache.dim, staged_);
      value_ = staged_, value_place_ = staged_place_;
    }
  }

  void load_scales(const Places& at, int head) {
    const CacheView& cache = *cache_;
    const int64_t skip = head * cache.scales.head;
    const float *key = cache.key_scale + skip, *value = cache.value_scale + skip;
    if (cache.scales.slot == 1 && cache.block_size % kAlign == 0) {
      for (int j = at.begin / kAlign * kAlign; j < at.end; j += V::width) {
        const int64_t place = at.scale_lane[j / kAlign] + j % kAlign;
        V::store(key_scale_ + j, V::load(key + place));
        V::store(value_scale_ + j, V::load(value + place));
      }
      return;
    }
    for (int j = at.begin; j < at.end; ++j) {
      key_scale_[j] = key[at.scale[j]];
      value_scale_[j] = value[at.scale[j]];
    }
  }

  // Side by side, since each exp is one long chain; added in order.
  template <int N>
  __attribute__((always_inline)) void weigh_vectors(int v, F top, F& sum, float* s) {
    constexpr int W = V::width;
    F p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) p[i] = exp<V>(V::sub(V::load(s + (v + i) * W), top));
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) sum = V::add(sum, p[i]);
    if (cache_->dtype == DType::i8)
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) p[i] = V::mul(p[i], V::load(value_scale_ + (v + i) * W));
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) V::store(s + (v + i) * W, p[i]);
  }

  template <int R, class T>
  void score_as(const float* query, int64_t stride, int first, int last, float* s, Ahead<V>& ahead) {
    score_rows<V, R, T>(query, stride, reinterpret_cast<const T* const*>(lane_), lane_stride_, cache_->dim, first,
                        last, s, ahead);
  }

  template <int R, class T>
  void add_as(const float* s, int from, int to, const float* rescale, float* o, int64_t stride, Ahead<V>& ahead) {
    value_rows<V, R, T>(s, static_cast<const T*>(value_), value_place_, from, to, cache_->dim, rescale, o, stride,
                        ahead);
  }

  const CacheView* cache_;
  float *panel_, *staged_;              // keys and values widened; see micro.h
  bool key_stored_, value_stored_;      // read from the cache as they lie
  const void* lane_[kTile / V::width];  // a head's keys, vector by vector; see score_rows
  int64_t lane_stride_;
  const void* value_;                   // a head's values
  const int64_t* value_place_;
  int64_t staged_place_[kTile];
  alignas(64) float key_scale_[kTile];
  alignas(64) float value_scale_[kTile];
};

}  // namespace octavo
