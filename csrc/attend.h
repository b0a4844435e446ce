// One task of paged attention: some query rows of one or more strips, over some KV heads and splits.
//
//   for each split                      partial state m, l, o of every row starts empty
//     for each tile of kTile positions  places of its keys, from the block table
//       for each KV head              K as lanes, packed where the cache holds rows; then, in batches of
//                                     kBatchRows: scores, kRowStep rows at a time -> weights -> values
//     store the partial, or fold it into the row's total
//
// Heads are inside tiles because a block's heads lie side by side in the cache: memory is read in order.
// Row state, per head and row:  m the largest score, l the sum of exp(score - m) by lane, o the sum of
// exp(score - m) * value. m starts at the lowest float, so that exp(-infinity - m) is 0 and never NaN.
#pragma once

#include <cfloat>
#include <cmath>

#include "common.h"
#include "fold.h"
#include "math.h"
#include "tile.h"

namespace octavo {

struct Row {
  int low, high;  // positions that the row sees
  int token;
  int member;  // of its head's group, 0..group-1
  int strip;
};

// Loops: Floats (tile.h) or Pairs (pairs.h), which say how a tile's keys, values, queries and weights lie.
template <class V, class Loops>
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
    float* panel = take(int64_t(kTile) * width);
    loops_.init(call.cache, panel, take(int64_t(kTile) * width));
    query_ = take(states * width);
    out_ = take(states * width);
    total_ = take(states * width);
    top_ = take(states);
    total_top_ = take(states);
    total_sum_ = take(states);
    sum_ = take(states * kAlign);
    rowinfo_ = reinterpret_cast<Row*>(take(int64_t(rows_) * int64_t(sizeof(Row) / sizeof(float))));
    plain_ = call.softcap == 0 && !call.alibi && call.cache.dtype != DType::i8;
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
      case DType::f32: return loops_.load_query(reinterpret_cast<const float*>(call_.query) + at, call_.scale, out);
      case DType::bf16: return loops_.load_query(reinterpret_cast<const bf16*>(call_.query) + at, call_.scale, out);
      default: return loops_.load_query(reinterpret_cast<const f16*>(call_.query) + at, call_.scale, out);
    }
  }

  void run_split(int split) {
    const int first = split * kSplit;
    const int from = low_ > first ? low_ : first;
    const int to = high_ < first + kSplit ? high_ : first + kSplit;
    const int last = (to - 1) / kTile * kTile;
    for (int tile = from / kTile * kTile; tile <= last; tile += kTile) {
      tile_ = tile;
      places_.begin = begin_ = from > tile ? from - tile : 0;
      places_.end = end_ = to - tile < kTile ? to - tile : kTile;
      find_places<V>(call_.cache, table_, tile, places_);
      ahead_.clear();
      // Few rows leave the kernel waiting for memory; with many, arithmetic takes longer than reading.
      if (rows_ <= kFetchRows && tile < last) fetch_ahead(tile + kTile, to - tile - kTile);
      for (int h = 0; h < heads(); ++h) run_head(h);
    }
  }

  void fetch_ahead(int tile, int keys) {
    const CacheView& cache = call_.cache;
    const int size = item_size(cache.dtype), block_size = cache.block_size;
    const int count = keys < kTile ? keys : kTile;
    for (int j = 0; j < count;) {
      const int logical = (tile + j) / block_size, offset = (tile + j) % block_size;
      const int run = block_size - offset < count - j ? block_size - offset : count - j;
      fetch_slots(cache.key, cache.keys, size, table_[logical], offset, run);
      fetch_slots(cache.value, cache.values, size, table_[logical], offset, run);
      if (cache.dtype == DType::i8) {
        fetch_scales(cache.key_scale, table_[logical], offset, run);
        fetch_scales(cache.value_scale, table_[logical], offset, run);
      }
      j += run;
    }
    const int row_groups = (rows_ + kRowStep - 1) / kRowStep;
    ahead_.start(int64_t(heads()) * row_groups * Loops::steps(cache.dim));
  }

  // Asks for `run` slots of a block, over the task's heads, in the fewest stretches.
  void fetch_slots(const char* base, const Strides& at, int size, int64_t block, int offset, int run) {
    const char* start = base + (block * at.block + offset * at.slot + task_.head_begin * at.head) * size;
    const int dim = call_.cache.dim;
    if (at.dim == 1 && at.head == dim) {  // a slot's heads side by side
      const int64_t row = int64_t(heads()) * dim;
      if (row == at.slot) return ahead_.add(start, row * run * size, 1, 0);
      return ahead_.add(start, row * size, run, at.slot * size);
    }
    const int64_t slots = at.dim == 1 ? at.slot * run : run;  // in a row of a head's
    const int rows = at.dim == 1 ? 1 : dim;
    const int64_t step = at.dim == 1 ? at.head : at.dim;
    if (rows == 1 ? slots == at.head : slots == at.dim && at.head == at.dim * dim)
      return ahead_.add(start, at.head * heads() * size, 1, 0);
    for (int h = 0; h < heads(); ++h)
      ahead_.add(start + h * at.head * size, slots * size, rows, step * size);
  }

  void fetch_scales(const float* base, int64_t block, int offset, int run) {
    const Strides& at = call_.cache.scales;
    const float* start = base + block * at.block + offset * at.slot + task_.head_begin * at.head;
    const int64_t last = (run - 1) * at.slot + (heads() - 1) * at.head;
    ahead_.add(reinterpret_cast<const char*>(start), (last + 1) * int64_t(sizeof(float)), 1, 0);
  }

  void run_head(int h) {
    loops_.load(places_, task_.head_begin + h, rows_, ahead_);
    // Scores of some rows first, then their values, so that K and V take turns in L1. Weights come between,
    // row by row: each is one long chain, and many rows fill the time of one.
    for (int begin = 0; begin < rows_; begin += kBatchRows) {
      const int end = rows_ - begin < kBatchRows ? rows_ : begin + kBatchRows;
      for_groups(begin, end, [&]<int R>(Size<R>, int r) { score_rows_of<R>(h, r, r - begin); });
      weigh_rows(h, begin, end);
      for_groups(begin, end, [&]<int R>(Size<R>, int r) { add_rows<R>(h, r, r - begin); });
    }
  }

  template <int R>
  struct Size {};

  template <class Body>
  void for_groups(int begin, int end, Body body) {
    for (int r = begin; r < end;) {
      // Near-equal groups: 8 rows as 4 + 4 use registers better than as 6 + 2.
      const int left = end - r, groups = (left + kRowStep - 1) / kRowStep;
      const int step = (left + groups - 1) / groups;
      switch (step) {
        case 1: body(Size<1>(), r); break;
        case 2: body(Size<2>(), r); break;
        case 3: body(Size<3>(), r); break;
        case 4: body(Size<4>(), r); break;
        case 5: body(Size<5>(), r); break;
        default: body(Size<6>(), r); break;
      }
      r += step;
    }
  }

  // The tile's keys from..to-1 that any of R rows sees.
  template <int R>
  void seen(int r, int& from, int& to) const {
    int low = rowinfo_[r].low, high = rowinfo_[r].high;
    for (int i = 1; i < R; ++i) {
      low = rowinfo_[r + i].low < low ? rowinfo_[r + i].low : low;
      high = rowinfo_[r + i].high > high ? rowinfo_[r + i].high : high;
    }
    from = low - tile_ > begin_ ? low - tile_ : begin_;
    to = high - tile_ < end_ ? high - tile_ : end_;
  }

  // Scores of R rows, the `at`th and following of the batch, against the keys that any of them sees.
  template <int R>
  void score_rows_of(int h, int r, int at) {
    int from, to;
    seen<R>(r, from, to);
    const int first = from / V::width, last = from < to ? (to + V::width - 1) / V::width : first;
    for (int i = 0; i < R; ++i) first_[at + i] = first, last_[at + i] = last;
    if (first == last) return;
    const int64_t state = int64_t(h) * rows_ + r;
    loops_.template score<R>(query_ + state * width(), width(), first, last, weight_ + at * kTile, ahead_);
  }

  // Scores to weights, and how much the rows' sums so far shrink.
  void weigh_rows(int h, int begin, int end) {
    alignas(64) float old_top[kBatchRows + kAlign];
    const int64_t state = int64_t(h) * rows_;
    for (int r = begin; r < end; ++r) {
      const int at = r - begin;
      old_top[at] = top_[state + r];
      if (first_[at] < last_[at])
        top_[state + r] = adjust_scores(h, rowinfo_[r], first_[at], last_[at], weight_ + at * kTile, old_top[at]);
    }
    for (int at = 0; at < end - begin; at += V::width)
      V::store(rescale_ + at, exp<V>(V::sub(V::load(old_top + at), V::load(top_ + state + begin + at))));
    for (int r = begin; r < end; ++r) {
      const int at = r - begin;
      if (first_[at] == last_[at]) continue;
      float* sums = sum_ + (state + r) * kAlign;
      F sum = V::mul(V::load(sums), V::set1(rescale_[at]));
      loops_.weigh(first_[at], last_[at], V::set1(top_[state + r]), sum, weight_ + at * kTile);
      V::store(sums, sum);
    }
  }

  template <int R>
  void add_rows(int h, int r, int at) {
    int from, to;
    seen<R>(r, from, to);
    if (from >= to) return;
    const int64_t state = int64_t(h) * rows_ + r;
    loops_.template add_values<R>(weight_ + at * kTile, from, to, rescale_ + at, out_ + state * width(), width(),
                                  ahead_);
  }

  // Applies the options and the row's mask to its scores; returns the new largest.
  float adjust_scores(int h, const Row& row, int first, int last, float* s, float top) {
    constexpr int W = V::width;
    const float cap = call_.softcap;
    const int head = (task_.head_begin + h) * call_.group + row.member;
    const bool whole = row.low <= tile_ + first * W && row.high >= tile_ + last * W;
    F best = V::set1(top);
    if (whole && plain_) {
      for (int v = first; v < last; ++v) best = V::max(best, V::load(s + v * W));
      return V::hmax(best);
    }
    const F low = V::set1(float(row.low - tile_)), high = V::set1(float(row.high - tile_));
    const F hidden = V::set1(-INFINITY);
    for (int v = first; v < last; ++v) {
      F x = V::load(s + v * W);
      if constexpr (Loops::scales)
        if (call_.cache.dtype == DType::i8) x = loops_.scaled(x, v);
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
  bool plain_;                    // no option changes a score
  Places places_;                 // of the tile
  Loops loops_;
  float *query_, *out_, *total_, *top_, *total_top_, *total_sum_, *sum_;
  Row* rowinfo_;
  int first_[kBatchRows], last_[kBatchRows];  // vectors of the tile with scores, per row of the batch
  Ahead<V> ahead_;
  alignas(64) float weight_[kBatchRows * kTile];        // scores, then weights, of a batch of rows
  alignas(64) float rescale_[kBatchRows + kAlign];      // of their sums so far; stores may run over
};

template <class V, class Loops = Floats<V>>
void attend(const Call& call, const Task& task, float* scratch) {
  TaskRunner<V, Loops>(call, task, scratch).run();
}

}  // namespace octavo
