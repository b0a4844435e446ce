// AVX-512 with AVX512_BF16: pairs of bfloat16 numbers multiplied and added to float32 lanes.
#pragma once

#include "simd_avx512.h"

namespace octavo {

struct Avx512Bf16 : Avx512 {
  using P = __m512bh;  // 16 pairs: lane i holds a[i] in its low half, b[i] in its high half

  // c + a.low * b.low + a.high * b.high. Sizes under 2^-126 count as zero.
  static F dot(P a, P b, F c) { return _mm512_dpbf16_ps(c, a, b); }

  static P set_pair(const bf16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return P(_mm512_set1_epi32(pair));
  }
  static P load_pairs(const bf16* p) { return P(_mm512_loadu_si512(p)); }
  static P load_pairs_part(const bf16* p, int n) {  // n numbers, then zeros
    return P(_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << n) - 1), p));
  }
  static void store_pairs(bf16* p, P x) { _mm512_storeu_si512(p, __m512i(x)); }

  // Pairs of 16 numbers at a and 16 at b; null is zeros.
  static P zip(const bf16* a, const bf16* b) { return zip(row(a), row(b)); }
  static P zip_part(const bf16* a, const bf16* b, int n) { return zip(row(a, n), row(b, n)); }

  static F as_floats(P x) { return F(x); }  // a lane of bits, for moves
  static P as_pairs(F x) { return P(x); }

  // To the nearest bfloat16, ties to even.
  static F rounded(F x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(x)), 16));
  }
  static void store_rounded(bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(x)); }

  // e^x for x <= 0 with a relative error under 2^-16, which is enough where eight bits are kept: exactly 1 at
  // 0, and 0 for -infinity. NaN stays NaN. The polynomial is 2^r on -1/2..1/2 with the least largest error.
  static F short_exp(F x) {
    const F t = mul(max(set1(-150.0f), x), set1(1.44269504088896341f));
    const F n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = sub(t, n);
    F p = fma(set1(9.582852945e-3f), r, set1(5.590642616e-2f));
    p = fma(p, r, set1(2.402409911e-1f));
    p = fma(p, r, set1(6.931241751e-1f));
    return _mm512_scalef_ps(fma(p, r, set1(1.0f)), n);
  }

 private:
  static __m256i narrowed(F x) { return __m256i(_mm512_cvtneps_pbh(x)); }
  static __m256i row(const bf16* p) {
    return p ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_setzero_si256();
  }
  static __m256i row(const bf16* p, int n) {
    return p ? _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p) : _mm256_setzero_si256();
  }
  static P zip(__m256i a, __m256i b) {
    return P(_mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
  }
};

}  // namespace octavo
