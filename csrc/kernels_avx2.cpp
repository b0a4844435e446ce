// The kernels for avx2; compiled with its own flags, see CMakeLists.txt.
#include "common.h"

#if defined(__x86_64__)
#include "attend.h"
#include "simd_avx2.h"
#include "write.h"
#endif

namespace octavo {

const Kernels* kernels_avx2() {
#if defined(__x86_64__)
  static const Kernels kernels = {"avx2", attend<Avx2>, merge<Avx2>, write<Avx2>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace octavo
