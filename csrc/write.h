// New K and V rows into the cache, converted to the stored dtype; optionally rotated first.
#pragma once

#include "common.h"
#include "micro.h"

namespace octavo {

// Dimension i pairs with i + dim / 2. Products are rounded before the sum, as torch's separate calls do.
template <class V>
void rotate(float* row, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + V::width <= half; i += V::width) {
    const typename V::F a = V::load(row + i), b = V::load(row + half + i);
    const typename V::F c = V::load(cos + i), s = V::load(sin + i);
    V::store(row + i, V::sub(V::mul(a, c), V::mul(b, s)));
    V::store(row + half + i, V::add(V::mul(b, c), V::mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = row[i], b = row[half + i];
    const float ac = a * cos[i], bs = b * sin[i], bc = b * cos[i], as = a * sin[i];
    row[i] = ac - bs;
    row[half + i] = bc + as;
  }
}

template <class V, class From, class To>
void convert_row(const From* in, To* out, int dim) {
  int d = 0;
  for (; d + V::width <= dim; d += V::width) V::store(out + d, V::load(in + d));
  if (d < dim) {
    To last[V::width];
    V::store(last, V::load_part(in + d, dim - d));
    for (int i = 0; d + i < dim; ++i) out[d + i] = last[i];
  }
}

// Symmetric: the largest size becomes 127. Returns the scale; a row of zeros has scale 0.
template <class V, class From>
float quantize_row(const From* in, int8_t* out, int dim) {
  alignas(64) float row[kMaxDim + V::width];
  convert_row<V>(in, row, dim);
  for (int d = dim; d < (dim + V::width - 1) / V::width * V::width; ++d) row[d] = 0;
  typename V::F largest = V::zero();
  for (int d = 0; d < dim; d += V::width) largest = V::max(largest, V::abs(V::load(row + d)));
  const float size = V::hmax(largest);
  const typename V::F factor = V::set1(size > 0 ? 127.0f / size : 0.0f);
  for (int d = 0; d < dim; d += V::width) V::store(row + d, V::mul(V::load(row + d), factor));
  convert_row<V>(row, out, dim);
  return size / 127.0f;
}

// A row at `out`, its elements `stride` apart.
template <class T>
void spread(const T* row, T* out, int64_t stride, int dim) {
  for (int d = 0; d < dim; ++d) out[d * stride] = row[d];
}

template <class V, class From, class To>
void store_converted(const From* in, char* base, int64_t at, int64_t stride, int dim) {
  To* out = reinterpret_cast<To*>(base) + at;
  if (stride == 1) return convert_row<V>(in, out, dim);
  To row[kMaxDim];
  convert_row<V>(in, row, dim);
  spread(row, out, stride, dim);
}

template <class V, class From>
void store_row(const WriteCall& call, const From* in, char* base, const Strides& strides, float* scales,
               int64_t slot, int head) {
  const CacheView& cache = call.cache;
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  const int64_t at = block * strides.block + offset * strides.slot + head * strides.head;
  switch (cache.dtype) {
    case DType::f32: return store_converted<V, From, float>(in, base, at, strides.dim, cache.dim);
    case DType::bf16: return store_converted<V, From, bf16>(in, base, at, strides.dim, cache.dim);
    case DType::f16: return store_converted<V, From, f16>(in, base, at, strides.dim, cache.dim);
    case DType::i8: {
      int8_t row[kMaxDim];
      scales[block * cache.scales.block + offset * cache.scales.slot + head * cache.scales.head] =
          quantize_row<V>(in, row, cache.dim);
      spread(row, reinterpret_cast<int8_t*>(base) + at, strides.dim, cache.dim);
    }
  }
}

template <class V, class From>
void write_tokens(const WriteCall& call, int64_t begin, int64_t end) {
  From* query = reinterpret_cast<From*>(call.query);
  From* key = reinterpret_cast<From*>(call.key);
  From* value = reinterpret_cast<From*>(call.value);
  for (int64_t token = begin; token < end; ++token) {
    if constexpr (sizeof(From) == sizeof(float)) {
      if (call.cos) {
        const int half = call.cache.dim / 2;
        const int64_t row = (call.positions ? call.positions[token] : token) * half;
        const float *cos = call.cos + row, *sin = call.sin + row;
        for (int h = 0; h < call.query_heads; ++h)
          rotate<V>(query + token * call.query_token_stride + h * call.query_head_stride, cos, sin, half);
        for (int h = 0; h < call.cache.heads; ++h)
          rotate<V>(key + token * call.key_token_stride + h * call.key_head_stride, cos, sin, half);
      }
    }
    for (int h = 0; h < call.cache.heads; ++h) {
      store_row<V>(call, key + token * call.key_token_stride + h * call.key_head_stride, call.cache.key,
                   call.cache.keys, call.cache.key_scale, call.slots[token], h);
      store_row<V>(call, value + token * call.value_token_stride + h * call.value_head_stride,
                   call.cache.value, call.cache.values, call.cache.value_scale, call.slots[token], h);
    }
  }
}

template <class V>
void write(const WriteCall& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case DType::f32: return write_tokens<V, float>(call, begin, end);
    case DType::bf16: return write_tokens<V, bf16>(call, begin, end);
    default: return write_tokens<V, f16>(call, begin, end);
  }
}

}  // namespace octavo
