// exp and tanh over vectors, after Cephes' expf and tanhf (Moshier): about one unit in the last place.
#pragma once

#include "common.h"

namespace octavo {

// e^x for x <= 88; exactly 1 at 0 and exactly 0 below -87.3, so a masked score of -infinity weighs nothing.
// NaN stays NaN.
template <class V>
typename V::F exp(typename V::F x) {
  using F = typename V::F;
  // Adding 1.5 * 2^23 rounds to an integer n and leaves n in the low bits of the sum.
  const F magic = V::set1(0x1.8p23f);
  const F t = V::fma(x, V::set1(1.44269504088896341f), magic);
  const F n = V::sub(t, magic);
  F r = V::fma(n, V::set1(-0.693359375f), x);  // x - n ln 2 in two parts
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  F p = V::set1(1.9875691500e-4f);
  p = V::fma(p, r, V::set1(1.3981999507e-3f));
  p = V::fma(p, r, V::set1(8.3334519073e-3f));
  p = V::fma(p, r, V::set1(4.1665795894e-2f));
  p = V::fma(p, r, V::set1(1.6666665459e-1f));
  p = V::fma(p, r, V::set1(5.0000001201e-1f));
  p = V::add(V::fma(p, V::mul(r, r), r), V::set1(1.0f));
  return V::select_lt(x, V::set1(-87.3f), V::zero(), V::scale_by_low_bits(p, t));
}

template <class V>
typename V::F tanh(typename V::F x) {
  using F = typename V::F;
  const F size = V::abs(x);
  const F z = V::mul(x, x);
  F p = V::set1(-5.70498872745e-3f);
  p = V::fma(p, z, V::set1(2.06390887954e-2f));
  p = V::fma(p, z, V::set1(-5.37397155531e-2f));
  p = V::fma(p, z, V::set1(1.33314422036e-1f));
  p = V::fma(p, z, V::set1(-3.33332819422e-1f));
  const F near = V::fma(V::mul(p, z), x, x);
  const F ten = V::set1(10.0f);
  const F bounded = V::select_lt(ten, size, ten, size);  // keeps NaN
  const F e = exp<V>(V::add(bounded, bounded));
  const F one = V::set1(1.0f);
  const F far = V::sub(one, V::div(V::set1(2.0f), V::add(e, one)));
  return V::select_lt(size, V::set1(0.625f), near, V::copysign(far, x));
}

}  // namespace octavo
