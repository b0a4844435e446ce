// Products for AVX2; compiled with its own flags, see CMakeLists.txt.
#include "linear_avx2.h"

namespace octavo {
namespace {

// maddubs adds two products in 16 bits. Sixteen products of 0..15 and -127..127 fit there: 8 * 2 * 15 * 127
// is 30,480. Signed weights give their sign to the activations; two products of 128 and 127 fit too.
struct Maddubs {
  struct Signed {
    __m256i value, size;
  };
  static __m256i pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
  static __m256i dot4(__m256i acc, __m256i w, __m256i x) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x));
  }
  static __m256i finish4(__m256i acc) { return pairs(acc); }
  static __m256i start8(__m256i) { return _mm256_setzero_si256(); }
  static Signed load_signed(__m256i w) { return {w, _mm256_abs_epi8(w)}; }
  static __m256i dot8(__m256i acc, Signed w, __m256i x) {
    return _mm256_add_epi32(acc, pairs(_mm256_maddubs_epi16(w.size, _mm256_sign_epi8(x, w.value))));
  }
};

}  // namespace

const LinearKernels* linear_avx2() {
  using V = Avx2Dot<Maddubs>;
  static const LinearKernels kernels = {"avx2", 6, 6, prepare_quantised<V>, prepare_float<V>,
    {product<V, F32Block, 6>, product<V, Q8Block, 6>, product<V, Q4Plain, 6>, product<V, Q4Offset, 6>}};
  return &kernels;
}

}  // namespace octavo
