// Rows of activations on their way into panels: normed where there is a norm, then rounded to eight bits or not.
//
//   row --norm_row--> normed --64 groups of 32 at a time, whatever their rows--> V::quantise --> panel
//
// A group's bytes and scale depend on its 32 numbers alone, whichever groups are rounded beside it.
#pragma once

#include <cstring>

#include "linear_types.h"
#include "math.h"

namespace octavo {

// Root mean square norm of a row: out = x * weight / sqrt(mean(x^2) + eps). Lanes are summed apart, then together.
template <class V>
void norm_row(const float* x, const float* weight, float eps, int64_t n, float* out) {
  using F = typename V::F;
  constexpr int W = V::width;
  F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int c = 0; c < 4; ++c) {
      const F v = V::load(x + i + c * W);
      sum[c] = V::fma(v, v, sum[c]);
    }
  for (; i + W <= n; i += W) {
    const F v = V::load(x + i);
    sum[0] = V::fma(v, v, sum[0]);
  }
  if (i < n) {
    const F v = V::load_part(x + i, int(n - i));
    sum[1] = V::fma(v, v, sum[1]);
  }
  const float squares = V::hsum(V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
  const float scale = 1.0f / __builtin_sqrtf(squares / float(n) + eps);
  const F factor = V::set1(scale);
  for (i = 0; i + W <= n; i += W)
    V::store(out + i, V::mul(V::mul(V::load(x + i), factor), V::load(weight + i)));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// A row, normed into `to` where there is a norm.
template <class V>
const float* normed_row(const PrepareCall& call, int64_t row, float* to) {
  const float* x = call.in + row * call.stride;
  if (!call.norm) return x;
  norm_row<V>(x, call.norm, call.eps, call.inputs, to);
  return to;
}

// Groups on their way into eight bits. Places past the last, up to a multiple of 16, hold the last again.
struct Rounding {
  const float* x[kRounded];
  char* out[kRounded];
  char* tail[kRounded];  // scale, product and sum go here, `step` bytes apart
};

// Rounds to the nearest of 127 steps each side, ties to even. A group below 1e-30 becomes zero. A group that
// holds a NaN or an infinity gets that scale and zeros: every result of the row is then NaN.
template <class V>
void round_groups(Rounding& groups, int count, int64_t step) {
  alignas(64) float scales[kRounded], products[kRounded];
  alignas(64) int32_t sums[kRounded];
  for (int i = count; i % 16; ++i) groups.x[i] = groups.x[count - 1], groups.out[i] = groups.out[count - 1];
  V::quantise(groups.x, groups.out, count, scales, sums);
  for (int i = 0; i < count; ++i) products[i] = scales[i] * float(sums[i]);
  for (int i = 0; i < count; ++i) {
    char* tail = groups.tail[i];
    std::memcpy(tail, scales + i, 4);
    std::memcpy(tail + step, products + i, 4);
    std::memcpy(tail + step * 2, sums + i, 4);
  }
}

// normed: [kMaxPanel][inputs]
template <class V>
void prepare_quantised(const PrepareCall& call, int64_t begin, int64_t end, float* normed) {
  const int64_t num_groups = call.inputs / kGroup;
  Rounding groups;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t first = panel_begin(call.rows, call.panels, p);
    const int rows = int(panel_begin(call.rows, call.panels, p + 1) - first);
    char* panel = call.packed + first * num_groups * panel_bytes(1);
    int count = 0;
    for (int row = 0; row < rows; ++row) {
      const float* x = normed_row<V>(call, first + row, normed + row * call.inputs);
      char* out = panel + row * kGroup;
      char* tail = panel + rows * kGroup + row * 4;
      for (int64_t g = 0; g < num_groups; ++g, x += kGroup, out += panel_bytes(rows), tail += panel_bytes(rows)) {
        groups.x[count] = x, groups.out[count] = out, groups.tail[count] = tail;
        if (++count == kRounded) round_groups<V>(groups, count, rows * 4), count = 0;
      }
    }
    if (count) round_groups<V>(groups, count, rows * 4);
  }
}

// Panel of floats: [inputs][rows].
template <class V>
void prepare_float(const PrepareCall& call, int64_t begin, int64_t end, float* normed) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t first = panel_begin(call.rows, call.panels, p);
    const int64_t rows = panel_begin(call.rows, call.panels, p + 1) - first;
    float* panel = reinterpret_cast<float*>(call.packed) + first * call.inputs;
    for (int64_t row = 0; row < rows; ++row) {
      const float* x = normed_row<V>(call, first + row, normed);
      for (int64_t k = 0; k < call.inputs; ++k) panel[k * rows + row] = x[k];
    }
  }
}

}  // namespace octavo
