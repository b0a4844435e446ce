// Sampling's passes over logits: maxima, weights, and which logits exceed a floor.
//
//   logits [V]    chunks of kChunk; the last is padded with -infinity in a copy
//   maxima        kMaxima per chunk: the i-th is the largest of logits i, i + 16, i + 32, ...
//   weight        e^((logit - max) / temperature), in units of 2^-40: 0 for exponents of -28 and less
//
// A weight is a function of logit, maximum and temperature alone: products and sums are each rounded, as
// octavo/ops/sorting.py spells out. Weights are whole numbers, so sums of them have one value in whatever
// order they are added. Two float32 parts carry one, high * 2^20 + low, each a whole number of at most 2^20,
// so that sixteen of them add up in a float32 without rounding.
#pragma once

#include "ops.h"

namespace octavo {

template <class V>
struct Weight {
  typename V::F high, low;
};

// The nearest whole number, ties to even, for sizes up to 2^22.
template <class V>
typename V::F whole(typename V::F x) {
  const typename V::F magic = V::set1(0x1.8p23f);
  return V::sub(V::add(x, magic), magic);
}

template <class V>
Weight<V> weigh(typename V::F logit, typename V::F max, typename V::F temperature) {
  using F = typename V::F;
  const F x = V::div(V::sub(logit, max), temperature);
  // Cephes' expf (Moshier): x = n ln 2 + r, and a polynomial in r. See math.h for the fused one.
  const F magic = V::set1(0x1.8p23f);
  const F t = V::add(V::mul(x, V::set1(1.44269504088896341f)), magic);
  const F n = V::sub(t, magic);
  F r = V::sub(x, V::mul(n, V::set1(0.693359375f)));
  r = V::add(r, V::mul(n, V::set1(2.12194440e-4f)));
  F p = V::set1(1.9875691500e-4f);
  p = V::add(V::mul(p, r), V::set1(1.3981999507e-3f));
  p = V::add(V::mul(p, r), V::set1(8.3334519073e-3f));
  p = V::add(V::mul(p, r), V::set1(4.1665795894e-2f));
  p = V::add(V::mul(p, r), V::set1(1.6666665459e-1f));
  p = V::add(V::mul(p, r), V::set1(5.0000001201e-1f));
  p = V::add(V::add(V::mul(p, V::mul(r, r)), r), V::set1(1.0f));
  const F scaled = V::mul(V::scale_by_low_bits(p, t), V::set1(0x1p20f));
  // The comparison also drops what came of -infinity above.
  const F size = V::select_lt(V::set1(-28.0f), x, scaled, V::zero());
  const F high = whole<V>(size);
  return {high, whole<V>(V::mul(V::sub(size, high), V::set1(0x1p20f)))};
}

// Calls body(chunk, number) for each chunk, whole.
template <class Body>
void for_chunks(const float* logits, int64_t size, Body body) {
  int64_t chunk = 0;
  for (; (chunk + 1) * kChunk <= size; ++chunk) body(logits + chunk * kChunk, chunk);
  if (chunk * kChunk == size) return;
  float last[kChunk];
  for (int i = 0; i < kChunk; ++i) {
    const int64_t at = chunk * kChunk + i;
    last[i] = at < size ? logits[at] : -__builtin_inff();
  }
  body(last, chunk);
}

// Four vectors of maxima become kMaxima floats, whatever their width.
template <class V>
void fold_maxima(typename V::F (&top)[4], float* maxima) {
  constexpr int kept = kMaxima / V::width;
  for (int i = kept; i < 4; ++i) top[i % kept] = V::max(top[i], top[i % kept]);
  for (int i = 0; i < kept; ++i) V::store(maxima + i * V::width, top[i]);
}

template <class V>
Scan scan(const float* logits, int64_t size, float* maxima) {
  using F = typename V::F;
  F sum[4];  // becomes NaN, and stays so, by any NaN, and by infinities of both signs
  for (F& each : sum) each = V::zero();
  F best = V::set1(-__builtin_inff());
  for_chunks(logits, size, [&](const float* chunk, int64_t number) {
    F top[4];
    for (F& each : top) each = V::set1(-__builtin_inff());
    for (int at = 0; at < kChunk; at += 4 * V::width) {
      for (int i = 0; i < 4; ++i) {
        const F x = V::load(chunk + at + i * V::width);
        top[i] = V::max(x, top[i]);
        sum[i] = V::add(sum[i], x);
      }
    }
    for (int i = 0; i < 4; ++i) best = V::max(top[i], best);
    fold_maxima<V>(top, maxima + number * kMaxima);
  });
  alignas(64) float lanes[V::width];
  V::store(lanes, V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
  float total = 0;
  for (int i = 0; i < V::width; ++i) total += lanes[i];
  const float max = V::hmax(best), infinity = __builtin_inff();
  return {max, total != total || max == infinity || max == -infinity};
}

template <class V>
void chunk_sums(const float* logits, int64_t size, float max, float temperature, int64_t* sums) {
  using F = typename V::F;
  const F top = V::set1(max), divisor = V::set1(temperature);
  for_chunks(logits, size, [&](const float* chunk, int64_t number) {
    double highs[V::width] = {}, lows[V::width] = {};
    for (int at = 0; at < kChunk; at += 16 * V::width) {
      F high = V::zero(), low = V::zero();
      for (int i = 0; i < 16; ++i) {
        const Weight<V> weight = weigh<V>(V::load(chunk + at + i * V::width), top, divisor);
        high = V::add(high, weight.high);
        low = V::add(low, weight.low);
      }
      alignas(64) float parts[2][V::width];
      V::store(parts[0], high);
      V::store(parts[1], low);
      for (int i = 0; i < V::width; ++i) highs[i] += parts[0][i], lows[i] += parts[1][i];
    }
    double high = 0, low = 0;
    for (int i = 0; i < V::width; ++i) high += highs[i], low += lows[i];
    sums[number] = int64_t(high) * (int64_t(1) << 20) + int64_t(low);
  });
}

template <class V>
void weights(const float* logits, int64_t size, float max, float temperature, int64_t* out) {
  const typename V::F top = V::set1(max), divisor = V::set1(temperature);
  for (int64_t at = 0; at < size; at += V::width) {
    const int64_t left = size - at;
    const typename V::F x = left >= V::width ? V::load(logits + at) : V::load_part(logits + at, int(left));
    const Weight<V> weight = weigh<V>(x, top, divisor);
    alignas(64) float parts[2][V::width];
    V::store(parts[0], weight.high);
    V::store(parts[1], weight.low);
    int64_t sums[V::width];
    for (int i = 0; i < V::width; ++i)
      sums[i] = int64_t(int32_t(parts[0][i])) * (int64_t(1) << 20) + int32_t(parts[1][i]);
    if (left >= V::width) {
      __builtin_memcpy(out + at, sums, sizeof sums);
    } else {
      __builtin_memcpy(out + at, sums, size_t(left) * sizeof *sums);
    }
  }
}

template <class V>
int64_t gather(const float* logits, int64_t size, float floor, int32_t first, int32_t* ids) {
  const typename V::F limit = V::set1(floor);
  int64_t count = 0, at = 0;
  for (; at + V::width <= size; at += V::width)
    for (uint32_t hits = V::lanes_ge(V::load(logits + at), limit); hits; hits &= hits - 1)
      ids[count++] = int32_t(first + at + __builtin_ctz(hits));
  for (; at < size; ++at)
    if (logits[at] >= floor) ids[count++] = int32_t(first + at);
  return count;
}

}  // namespace octavo
