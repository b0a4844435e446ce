// Sixteen float32 lanes: AVX-512 F, BW, VL, DQ. The operations are those listed in simd_baseline.h.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace octavo {

struct Avx512 {
  static constexpr int width = 16;
  static constexpr int cols = 4;  // with 6 rows: 24 accumulators, 4 operands and a broadcast of 32 registers
  using F = __m512;

  static F set1(float x) { return _mm512_set1_ps(x); }
  static F zero() { return _mm512_setzero_ps(); }
  static F iota() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static F select_lt(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static uint32_t lanes_ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F copysign(F size, F sign) {
    const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
    return _mm512_or_ps(size, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(sign), bit)));
  }
  static F scale_by_low_bits(F x, F t) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n));
  }
  static float hmax(F a) { return _mm512_reduce_max_ps(a); }
  static float hsum(F a) { return _mm512_reduce_add_ps(a); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static F load_part(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static F load_part(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static F load_part(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(n), p)));
  }

  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store(bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
  static void store(f16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(int8_t* p, F x) {  // x in -127..127
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
  }

  // x[i] lane j <-> x[j] lane i
  static void transpose(F (&x)[16]) {
    __m512d y[16];
    for (int i = 0; i < 16; i += 4) {
      const F a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
      const F c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
      y[i] = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c));
      y[i + 1] = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c));
      y[i + 2] = _mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d));
      y[i + 3] = _mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d));
    }
    // y[4 a + b] now holds, in 128-bit lane c, column 4 c + b of rows 4 a .. 4 a + 3.
    for (int b = 0; b < 4; ++b) {
      const F r0 = _mm512_castpd_ps(y[b]), r1 = _mm512_castpd_ps(y[4 + b]);
      const F r2 = _mm512_castpd_ps(y[8 + b]), r3 = _mm512_castpd_ps(y[12 + b]);
      const F even01 = _mm512_shuffle_f32x4(r0, r1, 0x88), odd01 = _mm512_shuffle_f32x4(r0, r1, 0xdd);
      const F even23 = _mm512_shuffle_f32x4(r2, r3, 0x88), odd23 = _mm512_shuffle_f32x4(r2, r3, 0xdd);
      x[b] = _mm512_shuffle_f32x4(even01, even23, 0x88);
      x[8 + b] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
      x[4 + b] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
      x[12 + b] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
  }

 private:
  static __mmask16 mask(int n) { return __mmask16((1u << n) - 1); }
  static F widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m256i narrow(F x) {  // to bfloat16, ties to even, any NaN to one quiet NaN
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_blend_epi32(nan, _mm512_srli_epi32(up, 16), _mm512_set1_epi32(0x7fc0)));
  }
};

}  // namespace octavo
