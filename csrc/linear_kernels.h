// The inner loops of products. A struct V has the float operations of simd_*.h and, on vectors of as many
// groups of four bytes, those listed in linear_baseline.cpp.
//
// A call handles R rows and C vectors of outputs. Both change how many results are computed side by side,
// never the order of additions inside one.
#pragma once

#include "linear_panels.h"

namespace octavo {

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
        const I x = V::quad(panel + r * kGroup + q * 4);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = V::dot4(acc[r][c], low[c], x);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = V::quad(panel + r * kGroup + (q + 4) * 4);
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
        const I x = V::quad(panel + r * kGroup + q * 4);
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

// -- a tile times a panel -----------------------------------------------------------------------------

// Where the results of a tile and a panel go.
struct Place {
  int64_t tile, row;
};

// Whole tiles straight from the registers; what is left of the last one through memory.
template <class V, int R, int C>
void finish(const ProductCall& call, typename V::F (&sum)[R][C], Place at) {
  using F = typename V::F;
  const bool gated = call.epilogue == Epilogue::swiglu;
  const int lanes = gated ? kHalf : kTileOutputs;
  const int64_t column = at.tile * lanes;
  if (call.outputs - column < lanes) {
    alignas(64) float sums[R * kTileOutputs];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) V::store(sums + r * kTileOutputs + c * V::width, sum[r][c]);
    return finish_tile<V>(call, sums, at.tile, at.row, R);
  }
  if (call.bias)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const F bias = V::load(call.bias + at.tile * kTileOutputs + c * V::width);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][c] = V::add(sum[r][c], bias);
    }
  float* out = call.out + at.row * call.stride + column;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r, out += call.stride) {
    if (gated) {
#pragma GCC unroll 4
      for (int c = 0; c < C / 2; ++c) V::store(out + c * V::width, silu_times<V>(sum[r][c], sum[r][c + C / 2]));
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float* to = out + c * V::width;
        V::store(to, call.epilogue == Epilogue::add ? V::add(V::load(to), sum[r][c]) : sum[r][c]);
      }
    }
  }
}

// Fetches meanwhile, with each group, some lines of the same group of the next tile, from line `fetched` on.
template <class V, template <class, int, int> class Block, int R, int C, int Lines>
void tile_times_panel(const ProductCall& call, const char* tile, int64_t groups, const char* panel,
                      int64_t panel_step, int64_t fetched, Place at) {
  using F = typename V::F;
  constexpr int vectors = kTileOutputs / V::width;
  alignas(64) float sums[C < vectors ? R * kTileOutputs : 1];
  const int64_t next = groups * Block<V, R, C>::bytes + fetched * 64;
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
      } else {
#pragma GCC unroll 32
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(weights + next + i * 64, 0, 2);
      }
      Block<V, R, C>::add(weights, vector, x, sum);
      weights += Block<V, R, C>::bytes;
      x += panel_step;
    }
    if constexpr (C == vectors) {
      finish<V>(call, sum, at);
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) V::store(sums + r * kTileOutputs + (vector + c) * V::width, sum[r][c]);
    }
  }
  if constexpr (C < vectors) finish_tile<V>(call, sums, at.tile, at.row, R);
}

// Vectors of outputs that a call with R rows handles, so that sums and operands fit the registers.
template <class V, int R>
constexpr int columns_for(int accumulators) {
  int c = kTileOutputs / V::width;
  while (c > 1 && R * c * accumulators > V::registers * 3 / 4) c /= 2;
  return c;
}

// row_bytes: of a panel, per row and group.
template <class V, template <class, int, int> class Block, int Lines, int Most, int R = 1>
void panel_of(const ProductCall& call, int rows, const char* tile, int64_t groups, const char* panel,
              int64_t row_bytes, int64_t fetched, Place at) {
  if (rows == R) {
    constexpr int C = columns_for<V, R>(Block<V, 1, 1>::accumulators);
    tile_times_panel<V, Block, R, C, Lines>(call, tile, groups, panel, R * row_bytes, fetched, at);
  } else if constexpr (R < Most) {
    panel_of<V, Block, Lines, Most, R + 1>(call, rows, tile, groups, panel, row_bytes, fetched, at);
  }
}

// The first panels of a tile fetch the next tile: it is in memory, and a processor that fetches by itself
// begins late, as reading starts over with each panel. Wide kernels read a tile once a panel, others do not.
template <class V, template <class, int, int> class Block, int Most>
void product(const ProductCall& call, int64_t tile_begin, int64_t tile_end) {
  constexpr bool floats = Block<V, 1, 1>::bytes == 128;
  constexpr int lines = floats || V::registers < 32 ? 0 : int((Block<V, 1, 1>::bytes + 63) / 64);
  constexpr int kFetching = 5, part = (lines + kFetching - 1) / kFetching;
  const int64_t groups = floats ? call.inputs : call.inputs / kGroup;
  const int64_t row_bytes = floats ? 4 : panel_bytes(1);
  const int64_t base = call.rows / call.panels, longer = call.rows % call.panels;  // as panel_begin
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const char* weights = call.tiles + tile * groups * Block<V, 1, 1>::bytes;
    const char* panel = call.packed;
    int64_t row = 0;
    for (int64_t p = 0; p < call.panels; ++p) {
      const int rows = int(base + (p < longer));
      if (call.panels >= kFetching && p < kFetching) {
        panel_of<V, Block, part, Most>(call, rows, weights, groups, panel, row_bytes, p * part, {tile, row});
      } else if (call.panels < kFetching && p == 0) {
        panel_of<V, Block, lines, Most>(call, rows, weights, groups, panel, row_bytes, 0, {tile, row});
      } else {
        panel_of<V, Block, 0, Most>(call, rows, weights, groups, panel, row_bytes, 0, {tile, row});
      }
      panel += rows * groups * row_bytes;
      row += rows;
    }
  }
}

}  // namespace octavo
