// Four float32 lanes in the compiler's own vectors: SSE2 on x86-64, NEON on AArch64, plain code elsewhere.
//
// Also the list of what a vector struct provides:
//   width, cols              lanes; vectors side by side in a micro-kernel (see micro.h)
//   set1 zero iota           iota is 0, 1, 2, ...
//   add sub mul div max      max gives its second operand where either is NaN
//   fma                      a * b + c, rounded once where the machine can
//   select_lt(a, b, x, y)    lanes of x where a < b, else of y
//   lanes_ge(a, b)           bit i is set where lane i of a is not under b's
//   abs copysign             copysign takes a size without a sign
//   scale_by_low_bits(x, t)  x * 2^n, where n is the low nine bits of t's pattern
//   hmax hsum                over lanes
//   load load_part store     from and to float, bf16, f16, int8; load_part reads n < width and pads with 0
//   transpose                width vectors
#pragma once

#include <cstring>

#include "common.h"

namespace octavo {

struct Baseline {
  static constexpr int width = 4;
  static constexpr int cols = 2;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));

  static F set1(float x) { return F{x, x, x, x}; }
  static F zero() { return F{0, 0, 0, 0}; }
  static F iota() { return F{0, 1, 2, 3}; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F select_lt(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static uint32_t lanes_ge(F a, F b) {
    const I yes = a >= b;
    return uint32_t((yes[0] & 1) | (yes[1] & 2) | (yes[2] & 4) | (yes[3] & 8));
  }
  static F abs(F a) { return F(I(a) & 0x7fffffff); }
  static F copysign(F size, F sign) { return F(I(size) | (I(sign) & int32_t(0x80000000u))); }
  static F scale_by_low_bits(F x, F t) { return F(I(x) + (I(t) << 23)); }
  static float hmax(F a) {
    const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
  }
  static float hsum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

  static F load(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  template <class T>
  static F load(const T* p) {
    return F{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
  }
  template <class T>
  static F load_part(const T* p, int n) {
    T whole[width] = {};
    for (int i = 0; i < n; ++i) whole[i] = p[i];
    return load(whole);
  }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  template <class T>
  static void store(T* p, F x) {
    for (int i = 0; i < width; ++i) narrow(p[i], x[i]);
  }
  static void transpose(F (&x)[4]) {
    const F a = F{x[0][0], x[1][0], x[2][0], x[3][0]}, b = F{x[0][1], x[1][1], x[2][1], x[3][1]};
    const F c = F{x[0][2], x[1][2], x[2][2], x[3][2]}, d = F{x[0][3], x[1][3], x[2][3], x[3][3]};
    x[0] = a, x[1] = b, x[2] = c, x[3] = d;
  }

 private:
  static float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  static uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static float widen(int8_t x) { return x; }
  static float widen(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }
  static float widen(f16 x) {
    // Exponent and mantissa move into place; the product then moves the bias and makes subnormals normal.
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, size = uint32_t(x.bits & 0x7fff) << 13;
    if (size >= 0x0f800000u) return from_bits(sign | size | 0x7f800000u);  // infinity and NaN
    const float scaled = from_bits(size) * 0x1p112f;
    return from_bits(sign | to_bits(scaled));
  }
  static void narrow(int8_t& out, float x) {  // x in -127..127, ties to even
    out = int8_t(to_bits(x + 0x1.8p23f) & 0xff);
  }
  static void narrow(bf16& out, float x) {
    const uint32_t bits = to_bits(x);
    out.bits = uint16_t(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  static void narrow(f16& out, float x) {
    const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000;
    const float size = from_bits(bits & 0x7fffffff);
    uint32_t half;
    if (!(size < 65520.0f)) {
      half = x != x ? 0x7e00 | ((bits >> 13) & 0x1ff) : 0x7c00;
    } else if (size < 0x1p-14f) {
      half = to_bits(size + 0.5f) - 0x3f000000u;  // subnormal: the sum rounds at the right bit
    } else {
      const uint32_t moved = to_bits(size) - (112u << 23);
      half = (moved + 0xfff + ((moved >> 13) & 1)) >> 13;
    }
    out.bits = uint16_t(sign | half);
  }
};

}  // namespace octavo
