// Runs plans and copies: memory that lasts between calls, and the instruction set in use.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.h"
#include "plan.h"

namespace octavo {

// Names of the instruction sets that this machine and this build have, fastest first.
std::vector<std::string> available_isas();

struct Copy {
  int64_t src, dst;
  int count;  // leading slots
};

// One caller at a time; others wait. No method needs the interpreter's lock.
class Engine {
 public:
  explicit Engine(const std::string& isa);  // throws std::invalid_argument where it is not available

  const Kernels& kernels() const { return *kernels_; }
  void attend(StepPlan& plan, Call& call);
  // Returns the first token whose slot is outside the cache, or -1 when all were written.
  int64_t write(const WriteCall& call, int64_t tokens, int threads);
  void copy_blocks(const CacheView& cache, const std::vector<Copy>& copies);
  // Between the cache and dense memory [count, block_size, heads, dim], in the order of ids.
  void move_blocks(const CacheView& cache, const int64_t* ids, int64_t count, const CacheView& dense,
                   bool into_cache, int threads);

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  struct Buffer {
    std::unique_ptr<float, Free> data;
    int64_t floats = 0;
    float* get(int64_t need);  // contents are lost when it grows
  };

  const Kernels* kernels_;
  std::mutex mutex_;
  Buffer partials_;
  std::vector<Buffer> scratch_;  // per thread
};

}  // namespace octavo
