// Products of activations with packed weights, and chains of them.
//
//   Linear    one matrix [outputs, inputs], packed once:   tile [inputs][kTileOutputs outputs] after tile
//   panel     a few rows of activations, interleaved, in float32 or in eight bits with scales
//   Stage     (norm) -> product -> store | add | silu(gate) * up
//   run       stages one after the other, in one parallel region
//
// Weights of four and eight bits keep the numbers of the GGUF block they came from: groups of 32 inputs share a
// half-precision scale (and offset). Activations are rounded to eight bits by groups of 32. A group's products
// are summed in integers, which is exact; groups are then added in float32 in order of the inputs, and a
// float32 product is one chain of fused additions in that order. So a row's bits depend on that row alone.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "linear_types.h"

namespace octavo {

// A packed matrix. Outputs lie in tiles in their order; or, paired, the first half of them (gate) in the first
// halves of tiles and the rest (up) in the second ones. Outputs past the last are zero.
struct Linear {
  Linear(Weights weights, int64_t outputs, int64_t inputs, bool paired);

  int64_t groups() const { return weights == Weights::f32 ? inputs : inputs / kGroup; }
  int64_t tile_bytes() const { return groups() * packed_bytes(weights); }
  int64_t bytes() const { return tiles * tile_bytes() + int64_t(bias.size() * sizeof(float)); }
  // Packs rows of outputs first..first+count-1, dense, as GGUF stores them (quantised) or in float32.
  void fill(int64_t first, int64_t count, const char* rows);
  void set_bias(const float* values);  // [outputs]
  // Reads outputs ids[0..count-1] back as float32 rows.
  void read_rows(const int64_t* ids, int64_t count, float* out) const;

  Weights weights;
  int64_t outputs, inputs, tiles;
  bool paired;
  std::vector<float> bias;  // by tile and lane; empty where there is none

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  void place(int64_t output, int64_t* tile, int* lane) const;
  std::unique_ptr<char, Free> data_;

 public:
  const char* data() const { return data_.get(); }
};

std::vector<std::string> linear_isas();  // that this machine and this build have, fastest first

constexpr int kScratch = -1;

// A product with what comes before and after. Slots are places in the array that run is given; kScratch is
// memory of the chain.
struct Stage {
  std::shared_ptr<Linear> linear;
  std::shared_ptr<std::vector<float>> norm;  // [inputs], or null
  float eps;
  Epilogue epilogue;
  int in, out;
};

struct Slot {
  float* data;
  int64_t stride;
};

using Chain = std::vector<Stage>;

// Runs chains; one caller at a time, others wait. No method needs the interpreter's lock.
//
// Few rows: threads share the tiles of each stage and wait for the last of them before the next. Many rows: a
// thread takes a block of rows through all stages alone, and nobody waits.
class LinearEngine {
 public:
  explicit LinearEngine(const std::string& isa);  // throws std::invalid_argument
  const LinearKernels& kernels() const { return *kernels_; }
  void run(const Chain& chain, const Slot* slots, int64_t rows, int threads);

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  struct Buffer {
    std::unique_ptr<char, Free> data;
    int64_t size = 0;
    char* get(int64_t need);  // contents are lost when it grows
  };
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0}, done{0};
  };
  struct Work;
  int64_t count_panels(const Stage& stage, int64_t rows) const;
  void prepare(const Work& work, const Stage& stage, int64_t base, int64_t rows, int64_t begin, int64_t end,
               char* panels, float* scratch, float* normed) const;
  void multiply(const Work& work, const Stage& stage, int64_t base, int64_t rows, const char* panels,
                float* scratch, int64_t tile_begin, int64_t tile_end) const;
  void run_blocks(const Work& work, int threads);
  void run_stages(const Work& work, int threads);

  const LinearKernels* kernels_;
  std::mutex mutex_;
  std::vector<Buffer> panels_;  // per thread: panels, then one normed row
  std::vector<Buffer> scratch_;
  std::unique_ptr<Counter[]> counters_;
  size_t num_counters_ = 0;
};

}  // namespace octavo
