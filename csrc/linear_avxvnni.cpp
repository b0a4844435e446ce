// Products for AVX2 with AVX-VNNI; compiled with its own flags, see CMakeLists.txt.
#include "linear_avx2.h"

namespace octavo {
namespace {

// dpbusd adds four products of an unsigned and a signed byte to 32 bits, exactly. Signed weights are moved by
// 128, and the sum starts from what that adds.
struct Dpbusd {
  using Signed = __m256i;
  static __m256i dot4(__m256i acc, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
  static __m256i finish4(__m256i acc) { return acc; }
  static __m256i start8(__m256i sum) {
    return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sum, 7));
  }
  static __m256i load_signed(__m256i w) { return _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80))); }
  static __m256i dot8(__m256i acc, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
};

}  // namespace

const LinearKernels* linear_avxvnni() {
  using V = Avx2Dot<Dpbusd>;
  static const LinearKernels kernels = {"avxvnni", 6, 6, prepare_quantised<V>, prepare_float<V>,
    {product<V, F32Block, 6>, product<V, Q8Block, 6>, product<V, Q4Plain, 6>, product<V, Q4Offset, 6>}};
  return &kernels;
}

}  // namespace octavo
