// Fetches the memory of the next tile while this one is computed.
//
//   runs     K of a block | V of the block | K of the next block | ...     whole lines, in order of address
//   steps    the inner loops of the running tile call step() once an iteration, and each fetches a few lines
//
// Memory keeps some tens of lines on their way and no more, so requests are spread over all the phases of a
// tile. The processor's own prefetcher follows a run once it has seen its start, but knows no block table.
#pragma once

#include "common.h"

namespace octavo {

// A template, so that each instruction set has a copy of its own; see common.h.
template <class V>
class Ahead {
 public:
  void clear() { runs_ = 0, lines_ = 0, each_ = 0; }

  // `count` stretches of `bytes`, `stride` bytes apart.
  void add(const char* start, int64_t bytes, int count, int64_t stride) {
    if (runs_ == kRuns) return;
    const int skew = int(reinterpret_cast<uintptr_t>(start) % 64);
    const int lines = int((bytes + skew + 63) / 64);
    run_[runs_++] = Run{start - skew, stride, lines, count};
    lines_ += int64_t(lines) * count;
  }

  // To be fetched in about so many steps.
  void start(int64_t steps) {
    each_ = int((lines_ + steps - 1) / steps);
    next_ = 0, left_ = 0, stretches_ = 0;
  }

  // The usual case keeps to registers: one load and one store of the cursor per step, not per line.
  __attribute__((always_inline)) void step() {
    const int each = each_;
    if (each == 0) return;
    if (left_ < each) return turn();
    const char* at = at_;
    for (int i = 0; i < each; ++i) __builtin_prefetch(at + i * 64);
    at_ = at + each * 64, left_ -= each;
  }

 private:
  static constexpr int kRuns = 4 * kTile;  // K, V and their scales, blocks of one slot
  struct Run {
    const char* start;
    int64_t stride;
    int lines, count;
  };

  // The step that finishes a stretch: goes on with the next ones.
  __attribute__((noinline)) void turn() {
    for (int i = each_; i > 0; --i) {
      if (left_ == 0 && !advance()) return;
      __builtin_prefetch(at_);
      at_ += 64, --left_;
    }
  }

  bool advance() {
    if (stretches_ == 0) {
      if (next_ == runs_) {
        each_ = 0;
        return false;
      }
      begin_ = run_[next_].start, stride_ = run_[next_].stride, stretches_ = run_[next_].count;
      length_ = run_[next_++].lines;
    }
    at_ = begin_, left_ = length_;
    begin_ += stride_, --stretches_;
    return true;
  }

  const char *at_, *begin_;
  int64_t stride_, lines_ = 0;
  int left_, length_, stretches_, next_, runs_ = 0, each_ = 0;
  Run run_[kRuns];
};

}  // namespace octavo
