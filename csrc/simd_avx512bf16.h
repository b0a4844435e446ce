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

  // Pairs of 16 numbers at a and 16 at b; `part` reads n of each.
  static P zip(const bf16* a, const bf16* b) { return zip(row(a), row(b)); }
  static P zip_part(const bf16* a, const bf16* b, int n) { return zip(row(a, n), row(b, n)); }
  // The same where b's follow a's.
  static P zip_halves(const bf16* a) {
    return P(_mm512_permutexvar_epi16(interleave(0, 16), _mm512_loadu_si512(a)));
  }
  // Pairs of 32 numbers at a and 32 at b.
  static void zip_two(const bf16* a, const bf16* b, P& first, P& second) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    first = P(_mm512_permutex2var_epi16(x, interleave(0, 32), y));
    second = P(_mm512_permutex2var_epi16(x, interleave(16, 48), y));
  }

  static F as_floats(P x) { return F(x); }  // a lane of bits, for moves
  static P as_pairs(F x) { return P(x); }

  // To the nearest bfloat16, ties to even.
  static void store_rounded(bf16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), __m256i(_mm512_cvtneps_pbh(x)));
  }
  // 32 numbers in order, two a pair.
  static P rounded(F first, F second) { return _mm512_cvtne2ps_pbh(second, first); }
  static P ones() { return P(_mm512_set1_epi16(0x3f80)); }

  // e^(x - top) for x <= top with a relative error under 2^-16, enough where eight bits are kept: exactly 1 at
  // top, 0 for -infinity. NaN stays NaN. The polynomial is 2^r on -1/2..1/2 with the least largest error.
  static F short_exp(F x, F top) {
    const F t = mul(max(set1(-150.0f), sub(x, top)), set1(1.44269504088896341f));
    const F n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = sub(t, n);
    F p = fma(set1(9.582852945e-3f), r, set1(5.590642616e-2f));
    p = fma(p, r, set1(2.402409911e-1f));
    p = fma(p, r, set1(6.931241751e-1f));
    return _mm512_scalef_ps(fma(p, r, set1(1.0f)), n);
  }

 private:
  static __m256i row(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m256i row(const bf16* p, int n) { return _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p); }
  static P zip(__m256i a, __m256i b) {
    return P(_mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
  }
  // Words a, b, a + 1, b + 1, ...
  static __m512i interleave(int a, int b) {
    const __m512i step = _mm512_setr_epi32(0, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005, 0x60006, 0x70007,
                                           0x80008, 0x90009, 0xa000a, 0xb000b, 0xc000c, 0xd000d, 0xe000e, 0xf000f);
    return _mm512_add_epi32(step, _mm512_set1_epi32(b << 16 | a));
  }
};

}  // namespace octavo
