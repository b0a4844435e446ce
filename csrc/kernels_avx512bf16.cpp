// Compiled with AVX512_BF16 on x86-64; see CMakeLists.txt. Caches of other dtypes than bfloat16 are plain
// AVX-512's, bit for bit.
#include "common.h"

#if defined(__AVX512BF16__)
#include "attend.h"
#include "pairs.h"
#include "simd_avx512bf16.h"
#include "write.h"
#endif

namespace octavo {

#if defined(__AVX512BF16__)
static void attend_pairs(const Call& call, const Task& task, float* scratch) {
  if (call.cache.dtype == DType::bf16) return attend<Avx512Bf16, Pairs<Avx512Bf16>>(call, task, scratch);
  kernels_avx512()->attend(call, task, scratch);
}

// A constant: this function runs on every machine, whatever it was compiled for.
const Kernels* kernels_avx512bf16() {
  static constexpr Kernels kernels{"avx512bf16", attend_pairs, merge<Avx512Bf16>, write<Avx512Bf16>};
  return &kernels;
}
#else
const Kernels* kernels_avx512bf16() { return nullptr; }
#endif

}  // namespace octavo
