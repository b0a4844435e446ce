// Products for AVX-512 with VNNI; compiled with its own flags, see CMakeLists.txt.
#include "linear_kernels.h"
#include "simd_avx512.h"

namespace octavo {
namespace {

// As in linear_avxvnni.cpp, on 64 bytes.
struct Avx512Dot : Avx512 {
  static constexpr int registers = 32;
  using I = __m512i;
  using Signed = __m512i;

  static constexpr int64_t offset(int vector, int quad) { return (quad * 2 + vector) * 64; }
  static I load_bytes(const char* p) { return _mm512_loadu_si512(p); }
  static I low4(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static I high4(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
  static I spread_int(const char* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  static I quad(const char* p) { return spread_int(p); }
  static F spread(const char* p) {
    float x;
    __builtin_memcpy(&x, p, 4);
    return _mm512_set1_ps(x);
  }
  static I start4() { return _mm512_setzero_si512(); }
  static I dot4(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static I finish4(I acc) { return acc; }
  static I start8(const char* sum) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(spread_int(sum), 7));
  }
  static I load_signed(const char* p) { return _mm512_xor_si512(load_bytes(p), _mm512_set1_epi8(char(0x80))); }
  static I dot8(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static I times_minus8(I x) { return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(x, 3)); }
  static I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }

  static void quantise(const float* x, char* out, int step, float* scale, int32_t* sum) {
    const F a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const I mask = _mm512_set1_epi32(0x7fffffff);
    const I most = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), mask),
                                    _mm512_and_si512(_mm512_castps_si512(b), mask));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float size;
    __builtin_memcpy(&size, &bits, 4);
    const bool finite = bits < 0x7f800000, some = finite && size >= 1e-30f;
    *scale = !finite ? size : some ? size / 127.0f : 0.0f;
    const F factor = _mm512_set1_ps(some ? 127.0f / size : 0.0f);
    const I m = some ? _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)) : _mm512_setzero_si512();
    const I n = some ? _mm512_cvtps_epi32(_mm512_mul_ps(b, factor)) : _mm512_setzero_si512();
    *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(m, n));
    alignas(32) char bytes[32];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(m));
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes + 16), _mm512_cvtepi32_epi8(n));
    for (int q = 0; q < 8; ++q) __builtin_memcpy(out + q * step, bytes + q * 4, 4);
  }
};

}  // namespace

const LinearKernels* linear_avx512vnni() {
  using V = Avx512Dot;
  static const LinearKernels kernels = {"avx512vnni", 8, 12, prepare_quantised<V>, prepare_float<V>,
    {product<V, F32Block, 12>, product<V, Q8Block, 8>, product<V, Q4Plain, 8>, product<V, Q4Offset, 8>}};
  return &kernels;
}

}  // namespace octavo
