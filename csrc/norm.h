// RMSNorm, with the residual added in the same pass, and SwiGLU, on rows of float32, bfloat16 or float16.
//
//   norm     x (+= delta);  out = (x * 1 / sqrt(mean(x^2) + eps)) * weight     Zhang and Sennrich, 2019
//   swiglu   out = gate / (1 + exp(-gate)) * up                                Shazeer, 2020
//
// Arithmetic in float32, one rounding to the dtype at the end; x + delta is rounded where it is stored, and
// the norm is of what was stored. The sum of squares has kLanes partial sums whatever the vectors' width,
// added in one order, so that every instruction set gives the same bits.
#pragma once

#include "math.h"
#include "ops.h"

namespace octavo {

template <class V, class T>
void store_part(T* out, typename V::F x, int n) {
  T last[V::width];
  V::store(last, x);
  for (int i = 0; i < n; ++i) out[i] = last[i];
}

template <class V, class T>
typename V::F load_up_to(const T* p, int64_t left) {
  return left >= V::width ? V::load(p) : V::load_part(p, int(left));
}

template <class V, class T>
void store_up_to(T* p, typename V::F x, int64_t left) {
  if (left >= V::width) {
    V::store(p, x);
  } else {
    store_part<V>(p, x, int(left));
  }
}

// Adds delta where there is one, and returns the sum of squares.
template <class V, class T>
float squares(T* x, const T* delta, int64_t dim) {
  constexpr int parts = kLanes / V::width;
  typename V::F sum[parts];
  for (int i = 0; i < parts; ++i) sum[i] = V::zero();
  for (int64_t d = 0; d < dim; d += kLanes) {
    for (int i = 0; i < parts; ++i) {
      const int64_t at = d + i * V::width, left = dim - at;
      if (left <= 0) break;
      typename V::F value = load_up_to<V>(x + at, left);
      if (delta) {
        store_up_to<V>(x + at, V::add(value, load_up_to<V>(delta + at, left)), left);
        value = load_up_to<V>(x + at, left);  // as it was rounded
      }
      sum[i] = V::add(sum[i], V::mul(value, value));
    }
  }
  alignas(64) float lanes[kLanes];
  for (int i = 0; i < parts; ++i) V::store(lanes + i * V::width, sum[i]);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class V, class T>
void norm_row(T* x, const T* delta, const T* weight, T* out, int64_t dim, float eps) {
  const float mean = squares<V>(x, delta, dim) / float(dim);
  const typename V::F factor = V::set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t d = 0; d < dim; d += V::width) {
    const int64_t left = dim - d;
    const typename V::F value = load_up_to<V>(x + d, left), scale = load_up_to<V>(weight + d, left);
    store_up_to<V>(out + d, V::mul(V::mul(value, factor), scale), left);
  }
}

template <class V, class T>
void norm_rows(const NormCall& call, int64_t begin, int64_t end) {
  const T* weight = reinterpret_cast<const T*>(call.weight);
  const T* delta = reinterpret_cast<const T*>(call.delta);
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < call.inner; ++j) {
      T* x = reinterpret_cast<T*>(call.x.data) + i * call.x.outer_stride + j * call.x.inner_stride;
      T* out = reinterpret_cast<T*>(call.out.data) + i * call.out.outer_stride + j * call.out.inner_stride;
      norm_row<V>(x, delta ? delta + i * call.dim : nullptr, weight, out, call.dim, call.eps);
    }
  }
}

template <class V>
void norm(const NormCall& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case DType::f32: return norm_rows<V, float>(call, begin, end);
    case DType::bf16: return norm_rows<V, bf16>(call, begin, end);
    default: return norm_rows<V, f16>(call, begin, end);
  }
}

template <class V>
typename V::F gated(typename V::F gate, typename V::F up) {
  const typename V::F least = V::set1(-88.0f);  // exp takes no more than 88; -88 / (1 + e^88) is near 0
  const typename V::F x = V::select_lt(gate, least, least, gate);  // keeps NaN
  return V::mul(V::div(x, V::add(V::set1(1.0f), exp<V>(V::sub(V::zero(), x)))), up);
}

template <class V, class T>
void swiglu_rows(const SwigluCall& call, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T* gate = reinterpret_cast<const T*>(call.gate) + i * call.gate_stride;
    const T* up = reinterpret_cast<const T*>(call.up) + i * call.up_stride;
    T* out = reinterpret_cast<T*>(call.out) + i * call.out_stride;
    for (int64_t d = 0; d < call.dim; d += V::width) {
      const int64_t left = call.dim - d;
      store_up_to<V>(out + d, gated<V>(load_up_to<V>(gate + d, left), load_up_to<V>(up + d, left)), left);
    }
  }
}

template <class V>
void swiglu(const SwigluCall& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case DType::f32: return swiglu_rows<V, float>(call, begin, end);
    case DType::bf16: return swiglu_rows<V, bf16>(call, begin, end);
    default: return swiglu_rows<V, f16>(call, begin, end);
  }
}

}  // namespace octavo
