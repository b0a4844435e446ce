// The kernels of ops.h for avx2; compiled with its own flags, see CMakeLists.txt.
#include "ops.h"

#if defined(__x86_64__)
#include "norm.h"
#include "simd_avx2.h"
#include "weigh.h"
#endif

namespace octavo {

const OpsKernels* ops_avx2() {
#if defined(__x86_64__)
  static const OpsKernels kernels = {"avx2", norm<Avx2>, swiglu<Avx2>, scan<Avx2>,
                                     chunk_sums<Avx2>, weights<Avx2>, gather<Avx2>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace octavo
