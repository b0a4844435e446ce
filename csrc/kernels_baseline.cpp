// The kernels for baseline; compiled with its own flags, see CMakeLists.txt.
#include "attend.h"
#include "common.h"
#include "simd_baseline.h"
#include "write.h"

namespace octavo {

const Kernels* kernels_baseline() {
  static const Kernels kernels = {"baseline", attend<Baseline>, merge<Baseline>, write<Baseline>};
  return &kernels;
}

}  // namespace octavo
