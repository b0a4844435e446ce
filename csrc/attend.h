// One task of paged attention: some query rows of one or more strips, over some KV heads and splits.
//
//   for each split                      partial state m, l, o of every row starts empty
//     for each tile of kTile positions  places of its keys, from the block table
//       for each KV head                pack K, then per kRowStep rows: scores -> softmax step -> values
//     store the partial, or fold it into the row's total
//
// Heads are inside tiles because a token's heads lie side by side in the cache: memory is read in order.
// Row state, per head and row:  m the largest score, l the sum of exp(score - m) by lane, o the sum of
// exp(score - m) * value. m starts at the lowest float, so that exp(-infinity - m) is 0 and never NaN.
#pragma once

#ifndef PFL
#define PFL 1
#endif
#include <cfloat>
#include <cmath>

#include "common.h"
#include "fold.h"
#include "math.h"
#include "micro.h"

namespace octavo {

struct Row {
  int low, high;  // positions that the row sees
  int token;
  int member;  // of its head's group, 0..group-1
  int strip;
};

template <class V>
class TaskRunner {
 public:
  using F = typename V::F;

  TaskRunner(const Call& call, const Task& task, float* scratch) : call_(call), task_(task) {
    const int width = padded(call.cache.dim);
    rows_ = 0;
    for (int i = task.member_begin; i < task.member_end; ++i) {
      const Strip& strip = call.strips[call.members[i]];
      rows_ += (strip.token_end - strip.token_begin) * call.group;
    }
    const int64_t states = int64_t(rows_) * (task.head_end - task.head_begin);
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += (floats + kAlign - 1) / kAlign * kAlign;
      return taken;
    };
    panel_ = take(int64_t(kTile) * width);
    staged_ = take(int64_t(kTile) * width);
    query_ = take(states * width);
    out_ = take(states * width);
    total_ = take(states * width);
    top_ = take(states);
    total_top_ = take(states);
    total_sum_ = take(states);
    sum_ = take(states * kAlign);
    rowinfo_ = reinterpret_cast<Row*>(take(int64_t(rows_) * int64_t(sizeof(Row) / sizeof(float))));
    direct_ = call.cache.dtype == DType::f32 && call.cache.dim % V::width == 0;
  }

  void run() {
    load_rows();
    for (int split = task_.split_begin; split < task_.split_end; ++split) {
      clear(top_, out_);
      for (int64_t i = 0; i < states() * kAlign; ++i) sum_[i] = 0;
      run_split(split);
      if (task_.whole) {
        fold_into_total();
      } else {
        store_partials(split);
      }
    }
    if (task_.whole) finish();
  }

 private:
  int heads() const { return task_.head_end - task_.head_begin; }
  int64_t states() const { return int64_t(rows_) * heads(); }
  int width() const { return padded(call_.cache.dim); }

  void clear(float* top, float* out) {
    for (int64_t i = 0; i < states(); ++i) top[i] = -FLT_MAX;
    for (int64_t i = 0; i < states() * width(); ++i) out[i] = 0;
  }

  void load_rows() {
    int row = 0;
    low_ = INT32_MAX, high_ = 0;
    for (int i = task_.member_begin; i < task_.member_end; ++i) {
      const int index = call_.members[i];
      const Strip& strip = call_.strips[index];
      for (int token = strip.token_begin; token < strip.token_end; ++token) {
        const int position = strip.position + token - strip.token_begin;
        const int low = position - call_.window >= 0 ? position - call_.window + 1 : 0;
        for (int g = 0; g < call_.group; ++g) rowinfo_[row++] = Row{low, position + 1, token, g, index};
        low_ = low < low_ ? low : low_;
        high_ = position + 1 > high_ ? position + 1 : high_;
      }
    }
    table_ = call_.batch.tables +
             call_.strips[call_.members[task_.member_begin]].sequence * call_.batch.table_stride;
    for (int h = 0; h < heads(); ++h)
      for (int r = 0; r < rows_; ++r) load_query(h, r);
    if (task_.whole) {
      clear(total_top_, total_);
      for (int64_t i = 0; i < states(); ++i) total_sum_[i] = 0;
    }
  }

  void load_query(int h, int r) {
    const int head = (task_.head_begin + h) * call_.group + rowinfo_[r].member;
    const int64_t at = rowinfo_[r].token * call_.query_token_stride + head * call_.query_head_stride;
    float* out = query_ + (int64_t(h) * rows_ + r) * width();
    switch (call_.query_dtype) {
      case DType::f32: return load_scaled(reinterpret_cast<const float*>(call_.query) + at, out);
      case DType::bf16: return load_scaled(reinterpret_cast<const bf16*>(call_.query) + at, out);
      default: return load_scaled(reinterpret_cast<const f16*>(call_.query) + at, out);
    }
  }

  template <class T>
  void load_scaled(const T* in, float* out) {
    const F scale = V::set1(call_.scale);
    int d = 0;
    for (; d + V::width <= call_.cache.dim; d += V::width) V::store(out + d, V::mul(V::load(in + d), scale));
    if (d < call_.cache.dim) V::store(out + d, V::mul(V::load_part(in + d, call_.cache.dim - d), scale));
  }

  void run_split(int split) {
    const int first = split * kSplit;
    const int from = low_ > first ? low_ : first;
    const int to = high_ < first + kSplit ? high_ : first + kSplit;
    const int last = (to - 1) / kTile * kTile;
    for (int tile = from / kTile * kTile; tile <= last; tile += kTile) {
      tile_ = tile;
      begin_ = from > tile ? from - tile : 0;
      end_ = to - tile < kTile ? to - tile : kTile;
      find_places(tile, begin_, end_, call_.cache.block_stride, call_.cache.slot_stride, place_);
      if (call_.cache.dtype == DType::i8)
        find_places(tile, begin_, end_, call_.cache.scale_block_stride, call_.cache.scale_slot_stride,
                    scale_place_);
      // Few rows leave the kernel waiting for memory; with many, arithmetic takes longer than reading.
      if (rows_ <= kFetchRows && tile < last) {
        fetch_ahead(tile + kTile, to - tile - kTile);
      } else {
        ahead_.stop();
      }
      for (int h = 0; h < heads(); ++h) run_head(h);
    }
  }

  void fetch_ahead(int tile, int keys) {
    const CacheView& cache = call_.cache;
    const int size = item_size(cache.dtype);
    find_places(tile, 0, keys < kTile ? keys : kTile, cache.block_stride * size, cache.slot_stride * size,
                next_place_);
    const int64_t skip = task_.head_begin * cache.head_stride * size;
    ahead_.start(cache.key + skip, cache.value + skip, next_place_, cache.dim * size,
                 cache.head_stride * size, heads());
  }

  // Where keys begin..end-1 of a tile lie. Lanes beside them get the place of a key, to be readable.
  void find_places(int tile, int begin, int end, int64_t block_stride, int64_t slot_stride, int64_t* place) {
    const int size = call_.cache.block_size;
    int logical = (tile + begin) / size, offset = (tile + begin) % size;
    for (int j = begin; j < end; ++logical, offset = 0) {
      const int run = size - offset < end - j ? size - offset : end - j;
      const int64_t start = table_[logical] * block_stride + offset * slot_stride;
      for (int i = 0; i < run; ++i) place[j + i] = start + i * slot_stride;
      j += run;
    }
    for (int j = 0; j < begin; ++j) place[j] = place[begin];
    for (int j = end; j < kTile; ++j) place[j] = place[begin];
  }

  void run_head(int h) {
    const CacheView& cache = call_.cache;
    const int64_t skip = (task_.head_begin + h) * cache.head_stride;
    switch (cache.dtype) {
      case DType::f32: load_tile<float>(skip); break;
      case DType::bf16: load_tile<bf16>(skip); break;
      case DType::f16: load_tile<f16>(skip); break;
      case DType::i8: load_tile<int8_t>(skip); load_scales(h); break;
    }
    for (int r = 0; r < rows_;) {
      // Near-equal groups: 8 rows as 4 + 4 use registers better than as 6 + 2.
      const int left = rows_ - r, groups = (left + kRowStep - 1) / kRowStep;
      const int step = (left + groups - 1) / groups;
      switch (step) {
        case 1: run_rows<1>(h, r); break;
        case 2: run_rows<2>(h, r); break;
        case 3: run_rows<3>(h, r); break;
        case 4: run_rows<4>(h, r); break;
        case 5: run_rows<5>(h, r); break;
        default: run_rows<6>(h, r); break;
      }
      r += step;
    }
  }

  template <class T>
  void load_tile(int64_t skip) {
    const CacheView& cache = call_.cache;
    const char* value = cache.value + skip * int64_t(sizeof(T));
    pack_keys<V, T>(cache.key + skip * int64_t(sizeof(T)), place_, begin_ / V::width,
                    (end_ + V::width - 1) / V::width, cache.dim, panel_, ahead_);
    if (direct_) {
      for (int j = begin_; j < end_; ++j) value_[j] = reinterpret_cast<const float*>(value) + place_[j];
    } else {
      stage_values<V, T>(value, place_, begin_, end_, cache.dim, staged_);
      for (int j = begin_; j < end_; ++j) value_[j] = staged_ + int64_t(j) * width();
    }
  }

  void load_scales(int h) {
    const int64_t skip = (task_.head_begin + h) * call_.cache.scale_head_stride;
    for (int j = 0; j < kTile; ++j) {
      key_scale_[j] = call_.cache.key_scale[scale_place_[j] + skip];
      value_scale_[j] = call_.cache.value_scale[scale_place_[j] + skip];
    }
  }

  template <int R>
  void run_rows(int h, int r) {
    int low = rowinfo_[r].low, high = rowinfo_[r].high;
    for (int i = 1; i < R; ++i) {
      low = rowinfo_[r + i].low < low ? rowinfo_[r + i].low : low;
      high = rowinfo_[r + i].high > high ? rowinfo_[r + i].high : high;
    }
    const int from = low - tile_ > begin_ ? low - tile_ : begin_;
    const int to = high - tile_ < end_ ? high - tile_ : end_;
    if (from >= to) return;
    const int64_t state = int64_t(h) * rows_ + r;
    const int first = from / V::width, last = (to + V::width - 1) / V::width;
    alignas(64) float s[R * kTile];
    alignas(64) float old_top[kAlign], rescale[kAlign];
    score_rows<V, R>(query_ + state * width(), width(), panel_, call_.cache.dim, first, last, s,
                     ahead_);
    for (int i = 0; i < R; ++i) {
      old_top[i] = top_[state + i];
      top_[state + i] = adjust_scores(h, rowinfo_[r + i], first, last, s + i * kTile, old_top[i]);
    }
    for (int i = 0; i < R; i += V::width)
      V::store(rescale + i, exp<V>(V::sub(V::load(old_top + i), V::load(top_ + state + i))));
    for (int i = 0; i < R; ++i)
      weigh(first, last, top_[state + i], rescale[i], s + i * kTile, sum_ + (state + i) * kAlign);
    value_rows<V, R>(s, value_, from, to, call_.cache.dim, rescale, out_ + state * width(), width(),
                     ahead_);
  }

  // Applies the options and the row's mask to its scores; returns the new largest.
  float adjust_scores(int h, const Row& row, int first, int last, float* s, float top) {
    constexpr int W = V::width;
    const float cap = call_.softcap;
    const int head = (task_.head_begin + h) * call_.group + row.member;
    const bool whole = row.low <= tile_ + first * W && row.high >= tile_ + last * W;
    const F low = V::set1(float(row.low - tile_)), high = V::set1(float(row.high - tile_));
    const F hidden = V::set1(-INFINITY);
    F best = V::set1(top);
    for (int v = first; v < last; ++v) {
      F x = V::load(s + v * W);
      if (call_.cache.dtype == DType::i8) x = V::mul(x, V::load(key_scale_ + v * W));
      if (cap != 0) x = V::mul(V::set1(cap), tanh<V>(V::div(x, V::set1(cap))));
      const F index = V::add(V::iota(), V::set1(float(v * W)));
      if (call_.alibi) {
        const F distance = V::add(index, V::set1(float(tile_ - (row.high - 1))));
        x = V::fma(V::set1(call_.alibi[head]), distance, x);
      }
      if (!whole) {
        x = V::select_lt(index, low, hidden, x);
        x = V::select_lt(index, high, x, hidden);
      }
      V::store(s + v * W, x);
      best = V::max(best, x);
    }
    return V::hmax(best);
  }

  // Turns scores into weights and adds them to the row's sums, lane by lane.
  void weigh(int first, int last, float top, float rescale, float* s, float* sum) {
    constexpr int W = V::width;
    const F shift = V::set1(top);
    F total = V::mul(V::load(sum), V::set1(rescale));
    for (int v = first; v < last; ++v) {
      F p = exp<V>(V::sub(V::load(s + v * W), shift));
      total = V::add(total, p);
      if (call_.cache.dtype == DType::i8) p = V::mul(p, V::load(value_scale_ + v * W));
      V::store(s + v * W, p);
    }
    V::store(sum, total);
  }

  void fold_into_total() {
    for (int64_t i = 0; i < states(); ++i)
      fold<V>(total_ + i * width(), total_top_[i], total_sum_[i], out_ + i * width(), top_[i],
           V::hsum(V::load(sum_ + i * kAlign)), width());
  }

  void store_partials(int split) {
    for (int h = 0; h < heads(); ++h) {
      for (int r = 0; r < rows_; ++r) {
        const Strip& strip = call_.strips[rowinfo_[r].strip];
        const int64_t state = int64_t(h) * rows_ + r;
        float* at = partial_row(call_, strip, split, rowinfo_[r].token,
                                (task_.head_begin + h) * call_.group + rowinfo_[r].member);
        for (int d = 0; d < width(); d += V::width) V::store(at + d, V::load(out_ + state * width() + d));
        at[width()] = top_[state];
        at[width() + 1] = V::hsum(V::load(sum_ + state * kAlign));
      }
    }
  }

  void finish() {
    for (int h = 0; h < heads(); ++h)
      for (int r = 0; r < rows_; ++r) {
        const int64_t state = int64_t(h) * rows_ + r;
        finish_row<V>(call_, rowinfo_[r].token, (task_.head_begin + h) * call_.group + rowinfo_[r].member,
                   total_ + state * width(), total_top_[state], total_sum_[state]);
      }
  }

  const Call& call_;
  const Task& task_;
  const int32_t* table_;
  int rows_, low_, high_;         // rows per head; positions that any of them sees
  int tile_, begin_, end_;        // the tile's position; keys begin_..end_-1 of it are read
  bool direct_;                   // values are read from the cache as they lie
  float *panel_, *staged_, *query_, *out_, *total_, *top_, *total_top_, *total_sum_, *sum_;
  Row* rowinfo_;
  int64_t place_[kTile], next_place_[kTile], scale_place_[kTile];
  Ahead ahead_;
  const float* value_[kTile];
  alignas(64) float key_scale_[kTile];
  alignas(64) float value_scale_[kTile];
};

template <class V>
void attend(const Call& call, const Task& task, float* scratch) {
  TaskRunner<V>(call, task, scratch).run();
}

}  // namespace octavo
