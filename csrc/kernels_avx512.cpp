// The kernels for avx512; compiled with its own flags, see CMakeLists.txt.
#include "attend.h"
#include "common.h"
#include "simd_avx512.h"
#include "write.h"

namespace octavo {

const Kernels* kernels_avx512() {
  static const Kernels kernels = {"avx512", attend<Avx512>, merge<Avx512>, write<Avx512>};
  return &kernels;
}

}  // namespace octavo
