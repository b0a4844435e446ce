// The instruction sets that other processors than x86-64 do not have.
#include "linear_types.h"

namespace octavo {

const LinearKernels* linear_avx2() { return nullptr; }
const LinearKernels* linear_avxvnni() { return nullptr; }
const LinearKernels* linear_avx512vnni() { return nullptr; }

}  // namespace octavo
