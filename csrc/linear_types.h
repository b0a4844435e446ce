// What products share with their kernels: formats, sizes and plain structs. See linear.h.
#pragma once

#include "common.h"

namespace octavo {

constexpr int kGroup = 32;        // inputs that share a scale
constexpr int kTileOutputs = 32;  // outputs of a tile
constexpr int kHalf = 16;         // outputs whose weights lie side by side; gate | up are the halves of a tile
constexpr int kMaxPanel = 12;     // rows of a panel, at most
constexpr int kRounded = 64;      // groups that are rounded to eight bits at once

enum class Weights : int { f32 = 0, q8_0 = 1, q4_0 = 2, q4_1 = 3 };
enum class Epilogue : int { store = 0, add = 1, swiglu = 2 };

// Bytes of one group of a GGUF row; of one input of a float32 row.
constexpr int stored_bytes(Weights w) {
  return w == Weights::q8_0 ? 34 : w == Weights::q4_0 ? 18 : w == Weights::q4_1 ? 20 : 4;
}
// Bytes that a tile takes for a group of inputs (quantised) or for one input (float32).
//   q4  [4 quads of inputs][2 halves of 64 bytes] ... see Q4 in linear_kernels.h, then 32 scales (, 32 offsets)
//   q8  [8 quads][2 halves of 64 bytes], then 32 scales
//   f32 [32 outputs]
constexpr int64_t packed_bytes(Weights w) {
  return w == Weights::q8_0 ? 1088 : w == Weights::q4_0 ? 576 : w == Weights::q4_1 ? 640 : 128;
}
// A group of a panel of R rows: [R][32] int8, [R] scales, [R] scale * sum, [R] integer sums.
constexpr int64_t panel_bytes(int rows) { return int64_t(rows) * (kGroup + 12); }

// Rows are cut into panels of at most `most`, as even as can be; the longer ones come first. Where one begins:
constexpr int64_t count_panels(int64_t rows, int most) { return (rows + most - 1) / most; }
constexpr int64_t panel_begin(int64_t rows, int64_t panels, int64_t p) {
  return rows / panels * p + (p < rows % panels ? p : rows % panels);
}

// Rows of activations on their way into panels.
struct PrepareCall {
  const float* in;
  int64_t stride;     // from row to row, in floats
  const float* norm;  // [inputs], or null
  float eps;
  int64_t inputs;
  char* packed;  // panels, one after the other
  int64_t rows, panels;
};

struct ProductCall {
  const char* tiles;
  const float* bias;
  int64_t inputs, outputs;  // outputs: columns of out
  const char* packed;  // panels, one after the other
  int64_t rows, panels;
  float* out;
  int64_t stride;
  Epilogue epilogue;
};

// One instruction set's entry points; product by Weights. normed: [inputs] floats of the calling thread.
struct LinearKernels {
  const char* name;
  int quantised_rows, float_rows;  // of a panel
  void (*prepare_quantised)(const PrepareCall&, int64_t panel_begin, int64_t panel_end, float* normed);
  void (*prepare_float)(const PrepareCall&, int64_t panel_begin, int64_t panel_end, float* normed);
  void (*product[4])(const ProductCall&, int64_t tile_begin, int64_t tile_end);
};

const LinearKernels* linear_baseline();
const LinearKernels* linear_avx2();  // null where not compiled in
const LinearKernels* linear_avxvnni();
const LinearKernels* linear_avx512vnni();

}  // namespace octavo
