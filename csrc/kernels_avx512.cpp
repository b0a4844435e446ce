// The kernels for avx512; compiled with its own flags, see CMakeLists.txt.
#include "common.h"

#if defined(__x86_64__)
#include "attend.h"
#include "simd_avx512.h"
#include "write.h"
#endif

namespace octavo {

const Kernels* kernels_avx512() {
#if defined(__x86_64__)
  static const Kernels kernels = {"avx512", attend<Avx512>, merge<Avx512>, write<Avx512>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace octavo
