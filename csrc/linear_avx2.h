// Integer operations on 32 bytes for AVX2 and AVX-VNNI; the list is in linear_baseline.cpp. A template over the
// way to multiply, so that each file that includes this has its own copy.
#pragma once

#include "linear_kernels.h"
#include "simd_avx2.h"

namespace octavo {

template <class Multiply>
struct Avx2Dot : Avx2 {
  static constexpr int registers = 16;
  using I = __m256i;
  using Signed = typename Multiply::Signed;

  static constexpr int64_t offset(int vector, int quad) { return (quad * 2 + vector / 2) * 64 + vector % 2 * 32; }
  static I load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
  static I low4(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static I high4(I x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
  static I spread_int(const char* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
  }
  static I quad(const char* p) { return spread_int(p); }
  static F spread(const char* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
  static I start4() { return _mm256_setzero_si256(); }
  static I dot4(I acc, I w, I x) { return Multiply::dot4(acc, w, x); }
  static I finish4(I acc) { return Multiply::finish4(acc); }
  static I start8(const char* sum) { return Multiply::start8(spread_int(sum)); }
  static Signed load_signed(const char* p) { return Multiply::load_signed(load_bytes(p)); }
  static I dot8(I acc, Signed w, I x) { return Multiply::dot8(acc, w, x); }
  static I times_minus8(I x) { return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(x, 3)); }
  static I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }

  static void quantise(const float* const* x, char* const* out, int count, float* scales, int32_t* sums) {
    for (int i = 0; i < count; ++i) quantise_group(x[i], out[i], scales + i, sums + i);
  }
  static void quantise_group(const float* x, char* out, float* scale, int32_t* sum) {
    I most = _mm256_setzero_si256();  // patterns: a NaN is above infinity, which is above every number
    F v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(x + i * 8);
      const I bits = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff));
      most = _mm256_max_epi32(most, bits);
    }
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    const int32_t bits = _mm_cvtsi128_si32(half);
    const float size = _mm_cvtss_f32(_mm_castsi128_ps(half));
    const bool finite = bits < 0x7f800000, some = finite && size >= 1e-30f;
    *scale = !finite ? size : some ? size / 127.0f : 0.0f;
    const F factor = _mm256_set1_ps(some ? 127.0f / size : 0.0f);
    I n[4];
    for (int i = 0; i < 4; ++i)
      n[i] = some ? _mm256_cvtps_epi32(_mm256_mul_ps(v[i], factor)) : _mm256_setzero_si256();
    const I total = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    *sum = _mm_cvtsi128_si32(t);
    // Packing works within 128-bit lanes, so quads come out as 0 2 4 6 | 1 3 5 7.
    const I packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<I*>(out), _mm256_permutevar8x32_epi32(packed, order));
  }
};

}  // namespace octavo
