// The inner loops of products. A struct V has the float operations of simd_*.h and, on vectors of as many
// groups of four bytes, those listed in linear_baseline.cpp.
//
// A call handles R rows and C vectors of outputs. Both change how many results are computed side by side,
// never the order of additions inside one.
#pragma once

#include <cstring>

#include "linear_types.h"
#include "math.h"

namespace octavo {

// -- rows into panels ---------------------------------------------------------------------------------

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

// Where a row goes: panel p holds rows p * size .. and as many of them as there are up to row_end.
struct PanelPlace {
  char* panel;
  int rows, row;
};

template <class V>
PanelPlace panel_place(const PrepareCall& call, int64_t row, int64_t row_end, int64_t row_bytes) {
  const int64_t panel = row / call.panel_rows, first = panel * call.panel_rows;
  const int64_t rows = row_end - first < call.panel_rows ? row_end - first : call.panel_rows;
  return {call.panels + first * row_bytes, int(rows), int(row - first)};
}

// Rounds to eight bits by groups of 32, to the nearest of 127 steps each side, ties to even. A group below
// 1e-30 becomes zero. A group that holds a NaN or an infinity gets that scale and zeros: every result of the
// row is then NaN.
template <class V>
void quantise_row(const float* x, int64_t groups, char* panel, int rows, int row) {
  for (int64_t g = 0; g < groups; ++g) {
    char* group = panel + g * panel_bytes(rows);
    float scale;
    int32_t sum;
    V::quantise(x + g * kGroup, group + row * 4, rows * 4, &scale, &sum);
    char* tail = group + rows * kGroup + row * 4;
    const float product = scale * float(sum);
    std::memcpy(tail, &scale, 4);
    std::memcpy(tail + rows * 4, &product, 4);
    std::memcpy(tail + rows * 8, &sum, 4);
  }
}

template <class V>
void prepare_quantised(const PrepareCall& call, int64_t row_begin, int64_t row_end, float* normed) {
  const int64_t groups = call.inputs / kGroup, row_bytes = groups * panel_bytes(1);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = call.in + row * call.stride;
    if (call.norm) {
      norm_row<V>(x, call.norm, call.eps, call.inputs, normed);
      x = normed;
    }
    const PanelPlace at = panel_place<V>(call, row, row_end, row_bytes);
    quantise_row<V>(x, groups, at.panel, at.rows, at.row);
  }
}

// Panel of floats: [inputs][rows].
template <class V>
void prepare_float(const PrepareCall& call, int64_t row_begin, int64_t row_end, float* normed) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = call.in + row * call.stride;
    if (call.norm) {
      norm_row<V>(x, call.norm, call.eps, call.inputs, normed);
      x = normed;
    }
    const PanelPlace at = panel_place<V>(call, row, row_end, call.inputs * int64_t(sizeof(float)));
    float* out = reinterpret_cast<float*>(at.panel) + at.row;
    for (int64_t k = 0; k < call.inputs; ++k) out[k * at.rows] = x[k];
  }
}

// -- weights ------------------------------------------------------------------------------------------
//
// Half h of a tile and quad q (inputs 4q..4q+3 of the group): 64 bytes, outputs side by side, four inputs each.

// Four bits: 64 bytes hold quads q (low halves of bytes) and q + 4 (high halves).
template <class V, int R, int C, bool Offset>
struct Q4Block {
  static constexpr int64_t bytes = Offset ? 640 : 576;
  static constexpr int accumulators = 2;
  using F = typename V::F;
  using I = typename V::I;

  static __attribute__((always_inline)) void add(const char* group, int vector, const char* panel,
                                                 F (&sum)[R][C]) {
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = V::start4();
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      I low[C], high[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const I both = V::load_bytes(group + V::offset(vector + c, q));
        low[c] = V::low4(both), high[c] = V::high4(both);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = V::quad(panel + (q * R + r) * 4);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = V::dot4(acc[r][c], low[c], x);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = V::quad(panel + ((q + 4) * R + r) * 4);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = V::dot4(acc[r][c], high[c], x);
      }
    }
    const f16* scales = reinterpret_cast<const f16*>(group + 512) + vector * V::width;
    const char* tail = panel + R * kGroup;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const F scale = V::load(scales + c * V::width);
      if constexpr (Offset) {
        const F offset = V::load(scales + kTileOutputs + c * V::width);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const F product = V::mul(scale, V::spread(tail + r * 4));
          sum[r][c] = V::fma(product, V::to_float(V::finish4(acc[r][c])), sum[r][c]);
          sum[r][c] = V::fma(offset, V::spread(tail + (R + r) * 4), sum[r][c]);
        }
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {  // stored numbers are 8 too large
          const F product = V::mul(scale, V::spread(tail + r * 4));
          const I eight = V::times_minus8(V::spread_int(tail + (2 * R + r) * 4));
          sum[r][c] = V::fma(product, V::to_float(V::add_int(V::finish4(acc[r][c]), eight)), sum[r][c]);
        }
      }
    }
  }
};

template <class V, int R, int C>
struct Q8Block {
  static constexpr int64_t bytes = 1088;
  static constexpr int accumulators = 2;
  using F = typename V::F;
  using I = typename V::I;

  static __attribute__((always_inline)) void add(const char* group, int vector, const char* panel,
                                                 F (&sum)[R][C]) {
    const char* tail = panel + R * kGroup;
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = V::start8(tail + (2 * R + r) * 4);
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
      typename V::Signed w[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) w[c] = V::load_signed(group + V::offset(vector + c, q));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = V::quad(panel + (q * R + r) * 4);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = V::dot8(acc[r][c], w[c], x);
      }
    }
    const f16* scales = reinterpret_cast<const f16*>(group + 1024) + vector * V::width;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const F scale = V::load(scales + c * V::width);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        sum[r][c] = V::fma(V::mul(scale, V::spread(tail + r * 4)), V::to_float(acc[r][c]), sum[r][c]);
    }
  }
};

template <class V, int R, int C>
struct F32Block {
  static constexpr int64_t bytes = 128;
  static constexpr int accumulators = 1;
  using F = typename V::F;
  static __attribute__((always_inline)) void add(const char* group, int vector, const char* panel,
                                                 F (&sum)[R][C]) {
    const float* w = reinterpret_cast<const float*>(group) + vector * V::width;
    F x[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) x[c] = V::load(w + c * V::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F a = V::spread(panel + r * 4);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::fma(a, x[c], sum[r][c]);
    }
  }
};

template <class V, int R, int C>
using Q4Plain = Q4Block<V, R, C, false>;
template <class V, int R, int C>
using Q4Offset = Q4Block<V, R, C, true>;

// -- a tile times a panel -----------------------------------------------------------------------------

template <class V, template <class, int, int> class Block, int R, int C>
void tile_times_panel(const char* tile, int64_t groups, const char* panel, int64_t panel_step, float* out) {
  using F = typename V::F;
  constexpr int vectors = kTileOutputs / V::width;
  for (int vector = 0; vector < vectors; vector += C) {
    F sum[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = V::zero();
    const char* weights = tile;
    const char* x = panel;
    for (int64_t g = 0; g < groups; ++g) {
      if constexpr (R <= 2) {
        for (int64_t i = 0; i < Block<V, R, C>::bytes; i += 64) __builtin_prefetch(weights + 4096 + i);
      }
      Block<V, R, C>::add(weights, vector, x, sum);
      weights += Block<V, R, C>::bytes;
      x += panel_step;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) V::store(out + r * kTileOutputs + (vector + c) * V::width, sum[r][c]);
  }
}

// -- what becomes of the sums -------------------------------------------------------------------------

template <class V>
typename V::F silu_times(typename V::F gate, typename V::F up) {
  // e^-x is exact enough down to the smallest normal number, and exp<V> takes at most 88.
  const typename V::F bounded = V::select_lt(gate, V::set1(-87.0f), V::set1(-87.0f), gate);
  const typename V::F e = exp<V>(V::sub(V::zero(), bounded));
  return V::mul(V::div(gate, V::add(V::set1(1.0f), e)), up);
}

template <class V>
void finish_tile(const ProductCall& call, float* sums, int64_t tile, int64_t row, int rows) {
  constexpr int W = V::width;
  const int lanes = call.epilogue == Epilogue::swiglu ? kHalf : kTileOutputs;
  const int64_t column = tile * lanes;
  const int64_t left = call.outputs - column;
  const int count = left < lanes ? int(left) : lanes;
  for (int r = 0; r < rows; ++r) {
    float* sum = sums + r * kTileOutputs;
    float* out = call.out + (row + r) * call.stride + column;
    if (call.bias)
      for (int i = 0; i < kTileOutputs; i += W)
        V::store(sum + i, V::add(V::load(sum + i), V::load(call.bias + tile * kTileOutputs + i)));
    if (call.epilogue == Epilogue::swiglu)
      for (int i = 0; i < kHalf; i += W)
        V::store(sum + i, silu_times<V>(V::load(sum + i), V::load(sum + kHalf + i)));
    int i = 0;
    if (call.epilogue == Epilogue::add) {
      for (; i + W <= count; i += W) V::store(out + i, V::add(V::load(out + i), V::load(sum + i)));
      for (; i < count; ++i) out[i] += sum[i];
    } else {
      for (; i + W <= count; i += W) V::store(out + i, V::load(sum + i));
      for (; i < count; ++i) out[i] = sum[i];
    }
  }
}

// Vectors of outputs that a call with R rows handles, so that sums and operands fit the registers.
template <class V, int R>
constexpr int columns_for(int accumulators) {
  int c = kTileOutputs / V::width;
  while (c > 1 && R * c * accumulators > V::registers * 3 / 4) c /= 2;
  return c;
}

template <class V, template <class, int, int> class Block, int Most, int R>
void panel_of(int rows, const char* tile, int64_t groups, const char* panel, int64_t row_bytes, float* out) {
  if (rows == R) {
    constexpr int C = columns_for<V, R>(Block<V, 1, 1>::accumulators);
    tile_times_panel<V, Block, R, C>(tile, groups, panel, R * row_bytes, out);
  } else if constexpr (R < Most) {
    panel_of<V, Block, Most, R + 1>(rows, tile, groups, panel, row_bytes, out);
  }
}

// row_bytes: of a panel, per row and group.
template <class V, template <class, int, int> class Block, int Most>
void product(const ProductCall& call, int64_t tile_begin, int64_t tile_end) {
  constexpr bool floats = Block<V, 1, 1>::bytes == 128;
  const int64_t groups = floats ? call.inputs : call.inputs / kGroup;
  const int64_t row_bytes = floats ? 4 : panel_bytes(1);
  alignas(64) float sums[kMaxPanel * kTileOutputs];
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const char* weights = call.tiles + tile * groups * Block<V, 1, 1>::bytes;
    for (int64_t row = 0; row < call.rows; row += Most) {
      const int rows = call.rows - row < Most ? int(call.rows - row) : Most;
      const char* panel = call.panels + row * groups * row_bytes;
      panel_of<V, Block, Most, 1>(rows, weights, groups, panel, row_bytes, sums);
      finish_tile<V>(call, sums, tile, row, rows);
    }
  }
}

}  // namespace octavo
