// Products for baseline, and the list of what a vector struct of linear_kernels.h provides besides the floats:
//
//   registers                  of the machine
//   load_bytes                 a vector of bytes
//   offset(vector, quad)       where, in a group, the bytes of a vector of outputs lie
//   low4 high4                 halves of bytes, as bytes of 0..15
//   quad spread spread_int     four bytes, a float, an integer from memory in every lane
//   start4 dot4 finish4        sums of products of 0..15 and int8, over one group, to integers
//   Signed load_signed         eight-bit weights
//   start8 dot8                sums of products of int8 (memory of start8: the sum of the row's group)
//   times_minus8 add_int to_float
//   quantise(x, out, count, scales, sums)   up to kRounded groups of 32 floats to 32 bytes each
#include "linear_kernels.h"
#include "simd_baseline.h"

namespace octavo {
namespace {

struct BaselineDot : Baseline {
  static constexpr int registers = 16;
  struct Bytes {
    uint8_t b[16];
  };
  // A struct for both: products of four bytes are summed into a lane.
  union I {
    int32_t i[4];
    uint8_t b[16];
    int8_t s[16];
  };
  using Signed = I;

  static constexpr int64_t offset(int vector, int quad) { return (quad * 2 + vector / 4) * 64 + vector % 4 * 16; }
  static I load_bytes(const char* p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static I low4(I x) {
    for (int i = 0; i < 16; ++i) x.b[i] &= 15;
    return x;
  }
  static I high4(I x) {
    for (int i = 0; i < 16; ++i) x.b[i] >>= 4;
    return x;
  }
  static I spread_int(const char* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return I{{v, v, v, v}};
  }
  static I quad(const char* p) { return spread_int(p); }
  static F spread(const char* p) {
    float v;
    std::memcpy(&v, p, 4);
    return set1(v);
  }
  static I start4() { return I{{0, 0, 0, 0}}; }
  static I dot4(I acc, I w, I x) { return dot8(acc, w, x); }  // 0..15 are the same, signed or not
  static I finish4(I acc) { return acc; }
  static I start8(const char*) { return start4(); }
  static I load_signed(const char* p) { return load_bytes(p); }
  static I dot8(I acc, I w, I x) {
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) acc.i[i] += int32_t(w.s[i * 4 + j]) * x.s[i * 4 + j];
    return acc;
  }
  static I times_minus8(I x) {
    for (int i = 0; i < 4; ++i) x.i[i] *= -8;
    return x;
  }
  static I add_int(I a, I b) {
    for (int i = 0; i < 4; ++i) a.i[i] += b.i[i];
    return a;
  }
  static F to_float(I x) { return F{float(x.i[0]), float(x.i[1]), float(x.i[2]), float(x.i[3])}; }

  static void quantise(const float* const* x, char* const* out, int count, float* scales, int32_t* sums) {
    for (int i = 0; i < count; ++i) quantise_group(x[i], out[i], scales + i, sums + i);
  }
  static void quantise_group(const float* x, char* out, float* scale, int32_t* sum) {
    int32_t most = 0;  // as patterns: a NaN is above infinity, which is above every number
    for (int i = 0; i < 32; ++i) {
      int32_t bits;
      std::memcpy(&bits, x + i, 4);
      bits &= 0x7fffffff;
      most = bits > most ? bits : most;
    }
    float size;
    std::memcpy(&size, &most, 4);
    const bool finite = most < 0x7f800000, some = finite && size >= 1e-30f;
    const float factor = some ? 127.0f / size : 0.0f;
    *scale = !finite ? size : some ? size / 127.0f : 0.0f;
    *sum = 0;
    for (int i = 0; i < 32; ++i) {
      const float scaled = some ? x[i] * factor : 0.0f;
      float rounded = scaled + 0x1.8p23f;  // ties to even; the integer is in the low bits
      int32_t bits;
      std::memcpy(&bits, &rounded, 4);
      const int8_t value = int8_t(bits & 0xff);
      out[i] = char(value);
      *sum += value;
    }
  }
};

}  // namespace

const LinearKernels* linear_baseline() {
  using V = BaselineDot;
  static const LinearKernels kernels = {"baseline", 4, 4, prepare_quantised<V>, prepare_float<V>,
    {product<V, F32Block, 4>, product<V, Q8Block, 4>, product<V, Q4Plain, 4>, product<V, Q4Offset, 4>}};
  return &kernels;
}

}  // namespace octavo
