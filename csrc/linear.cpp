#include "linear.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr int64_t kBlockRows = 48;           // of a block that one thread takes through a chain
constexpr int64_t kAlone = 200'000;          // products of a chain that are not worth a second thread
constexpr int64_t kPrepareAlone = 8 * 1024;  // activations that every thread prepares for itself
constexpr int64_t kTailBytes = 8192;         // kernels fetch ahead
constexpr int64_t kAheadBytes = 4096;        // as far as they do

bool runs_here(const LinearKernels* kernels) {
  if (!kernels) return false;
#if defined(__x86_64__)
  const std::string name = kernels->name;
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (name == "avx2") return avx2;
  if (name == "avxvnni") return avx2 && __builtin_cpu_supports("avxvnni");
  if (name == "avx512vnni")
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return true;
}

std::vector<const LinearKernels*> available() {
  std::vector<const LinearKernels*> found;
  for (const LinearKernels* kernels :
       {linear_avx512vnni(), linear_avxvnni(), linear_avx2(), linear_baseline()})
    if (runs_here(kernels)) found.push_back(kernels);
  return found;
}

float half_to_float(const char* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t sign = uint32_t(half & 0x8000) << 16, size = uint32_t(half & 0x7fff) << 13;
  uint32_t bits = sign | size | 0x7f800000u;
  float x;
  if (size < 0x0f800000u) {  // finite: the product moves the bias and makes subnormals normal
    std::memcpy(&x, &size, 4);
    x *= 0x1p112f;
    uint32_t moved;
    std::memcpy(&moved, &x, 4);
    bits = sign | moved;
  }
  std::memcpy(&x, &bits, 4);
  return x;
}

// Waits for other threads' part of a stage: briefly without giving up the core, then with.
void wait_for(const std::atomic<int64_t>& done, int64_t count) {
  for (int i = 0; done.load(std::memory_order_acquire) < count; ++i) {
    if (i > 4000) {
      std::this_thread::yield();
    } else {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }
}

// The first tile of a thread's share. A thread reads its share in one stretch; who is done takes from the others'.
int64_t share_begin(const Linear& linear, int thread, int threads) { return linear.tiles * thread / threads; }

// Begins to fetch what a thread will read first.
void fetch_share(const Linear& linear, int thread, int threads) {
  const char* weights = linear.data() + share_begin(linear, thread, threads) * linear.tile_bytes();
  for (int64_t i = 0; i < kAheadBytes; i += 64) __builtin_prefetch(weights + i);
}

bool quantised(const Linear& linear) { return linear.weights != Weights::f32; }

int64_t columns(const Stage& stage) {
  return stage.epilogue == Epilogue::swiglu ? stage.linear->outputs / 2 : stage.linear->outputs;
}

}  // namespace

std::vector<std::string> linear_isas() {
  std::vector<std::string> names;
  for (const LinearKernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

// -- packing ------------------------------------------------------------------------------------------

Linear::Linear(Weights kind, int64_t num_outputs, int64_t num_inputs, bool in_pairs)
    : weights(kind), outputs(num_outputs), inputs(num_inputs), paired(in_pairs) {
  const int64_t unit = paired ? kHalf : kTileOutputs, count = paired ? outputs / 2 : outputs;
  tiles = (count + unit - 1) / unit;
  const size_t bytes = size_t(tiles * tile_bytes() + kTailBytes + 4095) / 4096 * 4096;
  data_.reset(static_cast<char*>(std::aligned_alloc(4096, bytes)));
  if (!data_) throw std::bad_alloc();
  std::memset(data_.get(), 0, bytes);
}

void Linear::place(int64_t output, int64_t* tile, int* lane) const {
  if (!paired) {
    *tile = output / kTileOutputs, *lane = int(output % kTileOutputs);
  } else {
    const bool second = output >= outputs / 2;
    if (second) output -= outputs / 2;
    *tile = output / kHalf, *lane = int(output % kHalf) + (second ? kHalf : 0);
  }
}

// A group of a GGUF block is scale (, offset), then its bytes; four of these bytes are a quad, or two of them.
void Linear::fill(int64_t first, int64_t count, const char* rows) {
  const int64_t row_bytes = groups() * stored_bytes(weights), step = packed_bytes(weights);
  const int quads = weights == Weights::q8_0 ? 8 : 4;
  const int head = weights == Weights::q4_1 ? 4 : 2;
  for (int64_t i = 0; i < count; ++i) {
    int64_t tile;
    int lane;
    place(first + i, &tile, &lane);
    char* out = data_.get() + tile * tile_bytes();
    const char* row = rows + i * row_bytes;
    for (int64_t g = 0; g < groups(); ++g, out += step, row += stored_bytes(weights)) {
      if (weights == Weights::f32) {
        std::memcpy(out + lane * 4, row, 4);
        continue;
      }
      for (int q = 0; q < quads; ++q)
        std::memcpy(out + (q * 2 + lane / kHalf) * 64 + lane % kHalf * 4, row + head + q * 4, 4);
      char* scales = out + quads * 128;
      std::memcpy(scales + lane * 2, row, 2);
      if (head == 4) std::memcpy(scales + kTileOutputs * 2 + lane * 2, row + 2, 2);
    }
  }
}

void Linear::set_bias(const float* values) {
  bias.assign(size_t(tiles * kTileOutputs), 0.0f);
  for (int64_t i = 0; i < outputs; ++i) {
    int64_t tile;
    int lane;
    place(i, &tile, &lane);
    bias[size_t(tile * kTileOutputs + lane)] = values[i];
  }
}

void Linear::read_rows(const int64_t* ids, int64_t count, float* out) const {
  for (int64_t i = 0; i < count; ++i, out += inputs) {
    int64_t tile;
    int lane;
    place(ids[i], &tile, &lane);
    const char* in = data_.get() + tile * tile_bytes();
    for (int64_t g = 0; g < groups(); ++g, in += packed_bytes(weights)) {
      if (weights == Weights::f32) {
        std::memcpy(out + g, in + lane * 4, 4);
        continue;
      }
      const char* bytes = in + lane / kHalf * 64 + lane % kHalf * 4;
      const char* scales = in + (weights == Weights::q8_0 ? 1024 : 512);
      const float scale = half_to_float(scales + lane * 2);
      const float offset = weights == Weights::q4_1 ? half_to_float(scales + kTileOutputs * 2 + lane * 2) : 0.0f;
      for (int k = 0; k < kGroup; ++k) {
        float& x = out[g * kGroup + k];
        if (weights == Weights::q8_0) {
          x = scale * float(int8_t(bytes[k / 4 * 128 + k % 4]));
        } else {
          const int byte = uint8_t(bytes[k % 16 / 4 * 128 + k % 4]), value = k < 16 ? byte & 15 : byte >> 4;
          x = weights == Weights::q4_1 ? scale * float(value) + offset : scale * float(value - 8);
        }
      }
    }
  }
}

// -- chains -------------------------------------------------------------------------------------------

struct LinearEngine::Work {
  const Chain& chain;
  const Slot* slots;
  int64_t rows, scratch_columns;

  Slot slot(int number, int64_t base, float* scratch) const {
    if (number == kScratch) return {scratch, scratch_columns};
    return {slots[number].data + base * slots[number].stride, slots[number].stride};
  }
  int64_t panel_size(int64_t count) const {  // bytes of the largest stage's panels
    int64_t most = 0;
    for (const Stage& stage : chain) {
      const Linear& linear = *stage.linear;
      most = std::max(most, quantised(linear) ? count * linear.groups() * panel_bytes(1) : count * linear.inputs * 4);
    }
    return (most + 63) / 64 * 64;
  }
  int64_t widest() const {
    int64_t most = 0;
    for (const Stage& stage : chain) most = std::max(most, stage.linear->inputs);
    return most;
  }
};

char* LinearEngine::Buffer::get(int64_t need) {
  if (need > size) {
    const size_t bytes = size_t(need + 4095) / 4096 * 4096;
    data.reset(static_cast<char*>(std::aligned_alloc(4096, bytes)));
    size = data ? int64_t(bytes) : 0;
    if (!data) throw std::bad_alloc();
  }
  return data.get();
}

LinearEngine::LinearEngine(const std::string& isa) : kernels_(nullptr) {
  for (const LinearKernels* kernels : available())
    if (isa == kernels->name) kernels_ = kernels;
  if (!kernels_) throw std::invalid_argument("instruction set " + isa + " is not available");
}

int64_t LinearEngine::count_panels(const Stage& stage, int64_t rows) const {
  return octavo::count_panels(rows, quantised(*stage.linear) ? kernels_->quantised_rows : kernels_->float_rows);
}

// Panels begin..end-1 of `rows` rows from row `base` of the slots.
void LinearEngine::prepare(const Work& work, const Stage& stage, int64_t base, int64_t rows, int64_t begin,
                           int64_t end, char* panels, float* scratch, float* normed) const {
  const Slot in = work.slot(stage.in, base, scratch);
  const bool eight = quantised(*stage.linear);
  const PrepareCall call{in.data, in.stride, stage.norm ? stage.norm->data() : nullptr, stage.eps,
                         stage.linear->inputs, panels, rows, count_panels(stage, rows)};
  (eight ? kernels_->prepare_quantised : kernels_->prepare_float)(call, begin, end, normed);
}

void LinearEngine::multiply(const Work& work, const Stage& stage, int64_t base, int64_t rows,
                            const char* panels, float* scratch, int64_t tile_begin, int64_t tile_end) const {
  const Linear& linear = *stage.linear;
  const Slot out = work.slot(stage.out, base, scratch);
  const ProductCall call{linear.data(), linear.bias.empty() ? nullptr : linear.bias.data(),
                         linear.inputs, columns(stage), panels, rows, count_panels(stage, rows),
                         out.data, out.stride, stage.epilogue};
  kernels_->product[int(linear.weights)](call, tile_begin, tile_end);
}

void LinearEngine::run(const Chain& chain, const Slot* slots, int64_t rows, int threads) {
  if (rows <= 0 || chain.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  Work work{chain, slots, rows, 0};
  int64_t products = 0;
  for (const Stage& stage : chain) {
    products += rows * stage.linear->inputs * stage.linear->outputs;
    if (stage.out == kScratch) work.scratch_columns = std::max(work.scratch_columns, columns(stage));
  }
  if (products < kAlone) threads = 1;
  threads = std::max(threads, 1);
  if (panels_.size() < size_t(threads)) panels_.resize(size_t(threads)), scratch_.resize(size_t(threads));
  if (threads == 1 || rows >= kBlockRows * threads) {
    run_blocks(work, threads);
  } else {
    run_stages(work, threads);
  }
}

void LinearEngine::run_blocks(const Work& work, int threads) {
  // Equal blocks of at most kBlockRows, so that threads end together.
  const int64_t rounds = (work.rows + threads * kBlockRows - 1) / (threads * kBlockRows);
  const int64_t blocks = threads * rounds, block = (work.rows + blocks - 1) / blocks;
  const int64_t panel_size = work.panel_size(block);
  for (int i = 0; i < threads; ++i) {
    panels_[size_t(i)].get(panel_size + work.widest() * kMaxPanel * 4);
    scratch_[size_t(i)].get(block * work.scratch_columns * 4);
  }
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    char* panels = panels_[size_t(thread)].data.get();
    float* scratch = reinterpret_cast<float*>(scratch_[size_t(thread)].data.get());
    float* normed = reinterpret_cast<float*>(panels + panel_size);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      const int64_t base = work.rows * i / blocks, rows = work.rows * (i + 1) / blocks - base;
      for (const Stage& stage : work.chain) {
        prepare(work, stage, base, rows, 0, count_panels(stage, rows), panels, scratch, normed);
        multiply(work, stage, base, rows, panels, scratch, 0, stage.linear->tiles);
      }
    }
  };
  on_threads(threads, body);
}

void LinearEngine::run_stages(const Work& work, int threads) {
  // Of a stage: panels prepared, tiles multiplied, and tiles taken of each thread's share.
  const size_t stages = work.chain.size(), each = 2 + size_t(threads);
  if (num_counters_ < stages * each) {
    counters_.reset(new Counter[stages * each]);
    num_counters_ = stages * each;
  }
  for (size_t i = 0; i < stages * each; ++i) {
    const size_t part = i % each;
    const Linear& linear = *work.chain[i / each].linear;
    counters_[i].next.store(part < 2 ? 0 : share_begin(linear, int(part) - 2, threads), std::memory_order_relaxed);
    counters_[i].done.store(0, std::memory_order_relaxed);
  }
  const int64_t panel_size = work.panel_size(work.rows);
  for (int i = 0; i < threads; ++i) panels_[size_t(i)].get(panel_size + work.widest() * kMaxPanel * 4);
  float* scratch = reinterpret_cast<float*>(scratch_[0].get(work.rows * work.scratch_columns * 4));
  auto body = [&](int thread) {
    char* own = panels_[size_t(thread)].data.get();
    float* normed = reinterpret_cast<float*>(own + panel_size);
    fetch_share(*work.chain[0].linear, thread, threads);
    for (size_t s = 0; s < stages; ++s) {
      const Stage& stage = work.chain[s];
      const Linear& linear = *stage.linear;
      Counter& prepared = counters_[s * each];
      Counter& multiplied = counters_[s * each + 1];
      Counter* shares = &counters_[s * each + 2];
      const bool alone = work.rows * linear.inputs <= kPrepareAlone;
      char* panels = alone ? own : panels_[0].data.get();
      const int64_t num_panels = count_panels(stage, work.rows);
      if (!alone) {
        for (int64_t p; (p = prepared.next.fetch_add(1, std::memory_order_relaxed)) < num_panels;) {
          prepare(work, stage, 0, work.rows, p, p + 1, panels, scratch, normed);
          prepared.done.fetch_add(1, std::memory_order_release);
        }
        wait_for(prepared.done, num_panels);
      }
      const int64_t step = std::max<int64_t>(1, linear.tiles / (threads * 8 * work.rows));
      bool ready = !alone;
      for (int i = 0; i < threads; ++i) {
        const int owner = (thread + i) % threads;
        const int64_t last = share_begin(linear, owner + 1, threads);
        for (int64_t tile; (tile = shares[owner].next.fetch_add(step, std::memory_order_relaxed)) < last;) {
          // Only now: while a thread holds tiles, no later stage can change what it reads.
          if (!ready) prepare(work, stage, 0, work.rows, 0, num_panels, panels, scratch, normed), ready = true;
          const int64_t end = std::min(last, tile + step);
          multiply(work, stage, 0, work.rows, panels, scratch, tile, end);
          multiplied.done.fetch_add(end - tile, std::memory_order_release);
        }
      }
      if (s + 1 == stages) break;
      fetch_share(*work.chain[s + 1].linear, thread, threads);
      wait_for(multiplied.done, linear.tiles);
    }
  };
  on_threads(threads, body);
}

}  // namespace octavo
