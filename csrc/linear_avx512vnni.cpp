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

  // Sixteen groups side by side: their largest magnitudes are lanes of one vector, so one division does for all.
  static void quantise(const float* const* x, char* const* out, int count, float* scales, int32_t* sums) {
    alignas(64) float factors[kRounded];
    uint32_t valid[kRounded / 16];
    const F steps = _mm512_set1_ps(127.0f);
    for (int i = 0; i < count; i += 16) {
      I part[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) part[j] = sizes(x[i + j]);
      const I bits = merge_lanes(part);
      const F size = _mm512_castsi512_ps(bits);
      const __mmask16 finite = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
      const __mmask16 some = _mm512_mask_cmp_ps_mask(finite, size, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
      const F scale = _mm512_maskz_div_ps(some, size, steps);
      _mm512_store_ps(scales + i, _mm512_mask_mov_ps(scale, __mmask16(~finite), size));
      _mm512_store_ps(factors + i, _mm512_maskz_div_ps(some, steps, size));
      valid[i / 16] = some;
    }
    for (int i = 0; i < count; i += 16) {
      I pairs[8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const int at = i + j * 2;
        // Packing works within 128-bit lanes: quads are 0 4 of the first, 0 4 of the second, then 1 5 ...
        const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __mmask16 quads = __mmask16(((valid[i / 16] >> j * 2 & 3) * 0x81 & 0x101) * 0xff);
        const I packed = _mm512_packs_epi16(rounded(x[at], factors[at]), rounded(x[at + 1], factors[at + 1]));
        const I bytes = _mm512_maskz_permutexvar_epi32(quads, order, packed);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[at]), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[at + 1]), _mm512_extracti64x4_epi64(bytes, 1));
        pairs[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
      }
      _mm512_store_si512(sums + i, add_lanes(pairs));
    }
  }

 private:
  // The larger magnitudes of 32 floats, as patterns: a NaN is above infinity, which is above every number.
  static I sizes(const float* x) {
    const I mask = _mm512_set1_epi32(0x7fffffff);
    return _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(x), mask),
                            _mm512_and_si512(_mm512_loadu_si512(x + 16), mask));
  }
  static I rounded(const float* x, float factor) {
    const F f = _mm512_set1_ps(factor);
    return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), f)),
                              _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), f)));
  }
  // Lane i of the result: the largest lane of x[i].
  static I merge_lanes(I (&x)[16]) {
    for (int i = 0; i < 16; i += 2)
      x[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(x[i], x[i + 1]), _mm512_unpackhi_epi32(x[i], x[i + 1]));
    for (int i = 0; i < 16; i += 4)
      x[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(x[i], x[i + 2]), _mm512_unpackhi_epi64(x[i], x[i + 2]));
    for (int i = 0; i < 16; i += 8)
      x[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(x[i], x[i + 4], 0x44), _mm512_shuffle_i32x4(x[i], x[i + 4], 0xee));
    return _mm512_max_epi32(_mm512_shuffle_i32x4(x[0], x[8], 0x88), _mm512_shuffle_i32x4(x[0], x[8], 0xdd));
  }
  // Lanes 2 i and 2 i + 1 of the result: the sums of the lower and of the upper eight lanes of x[i].
  static I add_lanes(I (&x)[8]) {
    for (int i = 0; i < 8; i += 2)
      x[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[i], x[i + 1]), _mm512_unpackhi_epi32(x[i], x[i + 1]));
    for (int i = 0; i < 8; i += 4)
      x[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x[i], x[i + 2]), _mm512_unpackhi_epi64(x[i], x[i + 2]));
    const I sums = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[4], 0x88), _mm512_shuffle_i32x4(x[0], x[4], 0xdd));
    const I order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm512_permutexvar_epi32(order, sums);
  }
};

}  // namespace

const LinearKernels* linear_avx512vnni() {
  using V = Avx512Dot;
  static const LinearKernels kernels = {"avx512vnni", 6, 12, prepare_quantised<V>, prepare_float<V>,
    {product<V, F32Block, 12>, product<V, Q8Block, 6>, product<V, Q4Plain, 6>, product<V, Q4Offset, 6>}};
  return &kernels;
}

}  // namespace octavo
