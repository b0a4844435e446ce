// Eight float32 lanes: AVX2, FMA, F16C. The operations are those listed in simd_baseline.h.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace octavo {

struct Avx2 {
  static constexpr int width = 8;
  static constexpr int cols = 2;  // with 6 rows: 12 accumulators, 2 operands and a broadcast of 16 registers
  using F = __m256;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static F zero() { return _mm256_setzero_ps(); }
  static F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F select_lt(F a, F b, F yes, F no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static uint32_t lanes_ge(F a, F b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
  }
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static F copysign(F size, F sign) { return _mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
  static F scale_by_low_bits(F x, F t) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n));
  }
  static float hmax(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float hsum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  template <class T>
  static F load_part(const T* p, int n) {
    T whole[width] = {};
    for (int i = 0; i < n; ++i) whole[i] = p[i];
    return load(whole);
  }

  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store(bf16* p, F x) {  // ties to even, any NaN to one quiet NaN
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i wide = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
    const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
  }
  static void store(f16* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(int8_t* p, F x) {  // x in -127..127
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    const __m128i half = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
  }

  // x[i] lane j <-> x[j] lane i
  static void transpose(F (&x)[8]) {
    __m256 y[8];
    for (int i = 0; i < 8; i += 4) {
      const F a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpackhi_ps(x[i], x[i + 1]);
      const F c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
      y[i] = _mm256_shuffle_ps(a, c, 0x44);
      y[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      y[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      y[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_permute2f128_ps(y[i], y[4 + i], 0x20);
      x[4 + i] = _mm256_permute2f128_ps(y[i], y[4 + i], 0x31);
    }
  }
};

}  // namespace octavo
