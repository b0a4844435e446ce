// The kernels of ops.h for baseline; compiled with its own flags, see CMakeLists.txt.
#include "norm.h"
#include "ops.h"
#include "simd_baseline.h"
#include "weigh.h"

namespace octavo {

const OpsKernels* ops_baseline() {
  static const OpsKernels kernels = {"baseline",          norm<Baseline>,    swiglu<Baseline>, scan<Baseline>,
                                     chunk_sums<Baseline>, weights<Baseline>, gather<Baseline>};
  return &kernels;
}

}  // namespace octavo
