// The kernels of ops.h for avx512; compiled with its own flags, see CMakeLists.txt.
#include "ops.h"

#if defined(__x86_64__)
#include "norm.h"
#include "simd_avx512.h"
#include "weigh.h"
#endif

namespace octavo {

const OpsKernels* ops_avx512() {
#if defined(__x86_64__)
  static const OpsKernels kernels = {"avx512", norm<Avx512>, swiglu<Avx512>, scan<Avx512>,
                                     chunk_sums<Avx512>, weights<Avx512>, gather<Avx512>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace octavo
