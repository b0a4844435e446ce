// The kernels for avx2; compiled with its own flags, see CMakeLists.txt.
#include "attend.h"
#include "common.h"
#include "simd_avx2.h"
#include "write.h"

namespace octavo {

const Kernels* kernels_avx2() {
  static const Kernels kernels = {"avx2", attend<Avx2>, merge<Avx2>, write<Avx2>};
  return &kernels;
}

}  // namespace octavo
