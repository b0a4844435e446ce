#include "ops.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "engine.h"
#include "parallel.h"

namespace octavo {
namespace {

// Waking a thread that sleeps takes some 50 microseconds, in which one alone goes through this much.
constexpr int64_t kSerialBytes = 4 << 20;

// Calls body(begin, end) for parts of 0..count on threads, where `bytes` in all make that worth it.
template <class Body>
void in_parts(int64_t count, int64_t bytes, int threads, Body body) {
  if (bytes < kSerialBytes || threads <= 1 || count <= 1) return body(0, count);
  std::atomic<int64_t> next{0};
  const int64_t step = std::max<int64_t>(1, count / (threads * 4));
  auto work = [&](int) {
    for (int64_t begin; (begin = next.fetch_add(step, std::memory_order_relaxed)) < count;)
      body(begin, std::min(count, begin + step));
  };
  on_threads(threads, work);
}

}  // namespace

std::vector<std::string> ops_isas() {
  std::vector<std::string> names;
  for (const std::string& name : available_isas())
    for (const OpsKernels* kernels : {ops_avx512(), ops_avx2(), ops_baseline()})
      if (kernels && name == kernels->name) names.push_back(name);
  return names;
}

Ops::Ops(const std::string& isa) : kernels_(nullptr) {
  const std::vector<std::string> names = ops_isas();
  if (std::find(names.begin(), names.end(), isa) != names.end())
    for (const OpsKernels* kernels : {ops_avx512(), ops_avx2(), ops_baseline()})
      if (kernels && isa == kernels->name) kernels_ = kernels;
  if (!kernels_) throw std::invalid_argument("instruction set " + isa + " is not available");
}

void Ops::norm(const NormCall& call, int threads) const {
  const int64_t bytes = call.outer * call.inner * call.dim * item_size(call.dtype) * (call.delta ? 4 : 2);
  in_parts(call.outer, bytes, threads,
           [&](int64_t begin, int64_t end) { kernels_->norm(call, begin, end); });
}

void Ops::swiglu(const SwigluCall& call, int threads) const {
  const int64_t bytes = call.rows * call.dim * item_size(call.dtype) * 3;
  in_parts(call.rows, bytes, threads,
           [&](int64_t begin, int64_t end) { kernels_->swiglu(call, begin, end); });
}

}  // namespace octavo
