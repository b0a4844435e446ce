#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "parallel.h"

namespace octavo {
namespace {

constexpr int64_t kSerialCost = 8'000;        // about 4 microseconds; between two layers the others are awake
constexpr int64_t kSerialBytes = 128 * 1024;  // likewise for copies

bool runs_here(const Kernels* kernels) {
  if (!kernels) return false;
#if defined(__x86_64__)
  const std::string name = kernels->name;
  __builtin_cpu_init();
  if (name == "avx2")
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (name == "avx512bf16" && !__builtin_cpu_supports("avx512bf16")) return false;
  if (name == "avx512" || name == "avx512bf16")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return true;
}

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
  for (const Kernels* kernels : {kernels_avx512bf16(), kernels_avx512(), kernels_avx2(), kernels_baseline()})
    if (runs_here(kernels)) found.push_back(kernels);
  return found;
}

// Where a block's [slots, heads, dim] are `bytes` in one stretch, whatever their order; else 0.
int64_t stretch(const Strides& at, int slots, int heads, int dim, int64_t size) {
  const bool rows = at.dim == 1 && ((at.head == dim && at.slot == int64_t(heads) * dim) ||
                                    (at.slot == dim && at.head == int64_t(slots) * dim));
  const bool lanes = at.slot == 1 && at.dim == slots && at.head == int64_t(slots) * dim;
  return rows || lanes ? int64_t(slots) * heads * dim * size : 0;
}

bool same_order(const Strides& a, const Strides& b) {
  return a.slot == b.slot && a.head == b.head && a.dim == b.dim;
}

// Copies `slots` leading slots, `size` bytes an element.
void copy_part(const char* in, const Strides& from, char* out, const Strides& to, int slots, int heads,
               int dim, int64_t size) {
  for (int head = 0; head < heads; ++head) {
    if (from.dim == 1 && to.dim == 1) {
      for (int slot = 0; slot < slots; ++slot)
        std::memmove(out + (slot * to.slot + head * to.head) * size,
                     in + (slot * from.slot + head * from.head) * size, size_t(dim * size));
    } else if (from.slot == 1 && to.slot == 1) {
      for (int d = 0; d < dim; ++d)
        std::memmove(out + (d * to.dim + head * to.head) * size, in + (d * from.dim + head * from.head) * size,
                     size_t(slots * size));
    } else {
      for (int slot = 0; slot < slots; ++slot)
        for (int d = 0; d < dim; ++d)
          std::memcpy(out + (slot * to.slot + head * to.head + d * to.dim) * size,
                      in + (slot * from.slot + head * from.head + d * from.dim) * size, size_t(size));
    }
  }
}

void copy_array(const char* in, const Strides& from, int64_t src, char* out, const Strides& to, int64_t dst,
                const CacheView& cache, int slots, int dim, int64_t size) {
  in += src * from.block * size, out += dst * to.block * size;
  const int64_t whole = stretch(from, cache.block_size, cache.heads, dim, size);
  if (whole && slots == cache.block_size && same_order(from, to))
    std::memmove(out, in, size_t(whole));
  else
    copy_part(in, from, out, to, slots, cache.heads, dim, size);
}

// Copies `slots` leading slots of one block, K, V and scales.
void copy_slots(const CacheView& from, int64_t src, const CacheView& to, int64_t dst, int slots) {
  const int64_t size = item_size(from.dtype);
  copy_array(from.key, from.keys, src, to.key, to.keys, dst, from, slots, from.dim, size);
  copy_array(from.value, from.values, src, to.value, to.values, dst, from, slots, from.dim, size);
  if (!from.key_scale) return;
  Strides in = from.scales, out = to.scales;
  in.dim = out.dim = 1;
  const auto bytes = [](float* scales) { return reinterpret_cast<char*>(scales); };
  copy_array(bytes(from.key_scale), in, src, bytes(to.key_scale), out, dst, from, slots, 1, sizeof(float));
  copy_array(bytes(from.value_scale), in, src, bytes(to.value_scale), out, dst, from, slots, 1, sizeof(float));
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

float* Engine::Buffer::get(int64_t need) {
  if (need > floats) {
    const size_t bytes = (size_t(need) * sizeof(float) + 4095) / 4096 * 4096;
    data.reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
    floats = data ? need : 0;
    if (!data) throw std::bad_alloc();
  }
  return data.get();
}

Engine::Engine(const std::string& isa) : kernels_(nullptr) {
  for (const Kernels* kernels : available())
    if (isa == kernels->name) kernels_ = kernels;
  if (!kernels_) throw std::invalid_argument("instruction set " + isa + " is not available");
}

void Engine::attend(StepPlan& plan, Call& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int tasks = int(plan.tasks.size());
  const int threads = plan.cost < kSerialCost ? 1 : std::max(1, plan.config.threads);
  if (scratch_.size() < size_t(threads)) scratch_.resize(size_t(threads));
  for (int i = 0; i < threads; ++i) scratch_[size_t(i)].get(plan.scratch_floats);
  call.partials = partials_.get(plan.partial_floats);
  call.strips = plan.strips.data();
  call.members = plan.members.data();
  for (size_t i = 0; i < plan.strips.size(); ++i)
    plan.left[i].store(plan.strips[i].tasks, std::memory_order_relaxed);
  std::atomic<int> next{0}, next_strip{0};
  const int strips = int(plan.strips.size());
  auto work = [&](int thread) {
    float* scratch = scratch_[size_t(thread)].data.get();
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const Task& task = plan.tasks[size_t(i)];
      kernels_->attend(call, task, scratch);
      if (task.whole) continue;
      for (int m = task.member_begin; m < task.member_end; ++m)
        plan.left[size_t(plan.members[size_t(m)])].fetch_sub(1, std::memory_order_acq_rel);
    }
    // Partials are folded by all threads too: sequences that share a prefix become ready at one moment. What a
    // strip still waits for is running, for every task has been taken.
    for (int i; (i = next_strip.fetch_add(1, std::memory_order_relaxed)) < strips;) {
      const Strip& strip = plan.strips[size_t(i)];
      if (strip.tasks == 0) continue;
      while (plan.left[size_t(i)].load(std::memory_order_acquire) > 0) std::this_thread::yield();
      kernels_->merge(call, strip, scratch);
    }
  };
  on_threads(threads, work);
}

int64_t Engine::write(const WriteCall& call, int64_t tokens, int threads) {
  const int64_t slots = call.cache.num_blocks * call.cache.block_size;
  for (int64_t i = 0; i < tokens; ++i)
    if (call.slots[i] < 0 || call.slots[i] >= slots) return i;
  const int64_t bytes = tokens * call.cache.heads * call.cache.dim * 8;
  if (bytes < kSerialBytes || threads <= 1) {
    kernels_->write(call, 0, tokens);
    return -1;
  }
  std::atomic<int64_t> next{0};
  const int64_t step = std::max<int64_t>(1, tokens / (threads * 4));
  auto work = [&](int) {
    for (int64_t begin; (begin = next.fetch_add(step, std::memory_order_relaxed)) < tokens;)
      kernels_->write(call, begin, std::min(tokens, begin + step));
  };
  on_threads(threads, work);
  return -1;
}

void Engine::copy_blocks(const CacheView& cache, const std::vector<Copy>& copies) {
  for (const Copy& copy : copies)
    if (copy.src != copy.dst) copy_slots(cache, copy.src, cache, copy.dst, copy.count);
}

void Engine::move_blocks(const CacheView& cache, const int64_t* ids, int64_t count, const CacheView& dense,
                         bool into_cache, int threads) {
  const int64_t bytes = count * cache.block_size * cache.heads * cache.dim * item_size(cache.dtype) * 2;
  std::atomic<int64_t> next{0};
  auto work = [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      if (into_cache) {
        copy_slots(dense, i, cache, ids[i], cache.block_size);
      } else {
        copy_slots(cache, ids[i], dense, i, cache.block_size);
      }
    }
  };
  on_threads(bytes < kSerialBytes ? 1 : std::max(1, threads), work);
}

}  // namespace octavo
