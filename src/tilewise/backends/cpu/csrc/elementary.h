// exp, tanh and log on vectors, without tables, branches or libm.
#pragma once
#include "simd.h"

namespace TW_NAMESPACE {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kInf = __builtin_inff();

// x log2 e = n + f, |f| <= 1/2: adding 1.5 * 2^23 + 127 leaves n + 127 in the low bits, which shifted into the exponent field is 2^n.
constexpr float kMagic = 12582912.f + 127.f;
TW_INLINE vf power_of_two(vf t) { return (vf)((vi)t << 23); }

// (2^f - 1) / f on |f| <= 1/2, minimax for 2^f: relative error 2e-9, below the rounding errors of its evaluation.
constexpr float kExp2[6] = {0.6931471824645996f,   0.24022647738456726f,   0.055503323674201965f,
                            0.00961843691766262f, 0.0013398875016719103f, 0.00015353361959569156f};

// The exponent of a probability from a score and LSE, which may have been rounded down by much where it is large; NaN stays.
TW_INLINE vf at_most_0(vf x) { return x > vf{} ? vf{} : x; }

// exp(x) = 2^n (1 + (2^f - 1)). x <= -88.03 (2^-127), -inf included, gives exactly 0; a NaN comes through, whatever its payload, because 2^n is
// multiplied in. U independent evaluations step by step, so that their latencies overlap.
template <int U>
TW_INLINE void exp_each(vf* x) {
  vf t[U], f[U], p[U];
  TW_UNROLL for (int u = 0; u < U; u++) x[u] = maximum(splat(-88.0297f), x[u]);
  TW_UNROLL for (int u = 0; u < U; u++) t[u] = x[u] * splat(kLog2e) + splat(kMagic);
  TW_UNROLL for (int u = 0; u < U; u++) f[u] = t[u] - splat(kMagic);
  TW_UNROLL for (int u = 0; u < U; u++) f[u] = x[u] * splat(kLog2e) - f[u];
  TW_UNROLL for (int u = 0; u < U; u++) p[u] = splat(kExp2[5]) * f[u] + splat(kExp2[4]);
  TW_UNROLL for (int c = 3; c >= 0; c--) TW_UNROLL for (int u = 0; u < U; u++) p[u] = p[u] * f[u] + splat(kExp2[c]);
  TW_UNROLL for (int u = 0; u < U; u++) p[u] = p[u] * f[u];
  TW_UNROLL for (int u = 0; u < U; u++) x[u] = p[u] * power_of_two(t[u]) + power_of_two(t[u]);
}

TW_INLINE vf exp_of(vf x) {
  exp_each<1>(&x);
  return x;
}

// tanh(x) = sign(x) e / (e + 2), e = exp(2|x|) - 1 = 2^n (2^f - 1) + (2^n - 1): relative accuracy down to x = 0. slope: 1 - tanh^2 =
// r (2 - r) with r = 2 / (e + 2) = 1 - |tanh|, relative accuracy up to the cap; 0 beyond 43, where it is 2e-37.
TW_INLINE vf tanh_of(vf x, vf& slope) {
  const vi sign = (vi)x & splat((int32_t)0x80000000);
  const vf size = (vf)((vi)x ^ sign), a = size > splat(43.f) ? splat(43.f) : size;  // NaN stays
  const vf t = a * (2.f * kLog2e) + kMagic, f = a * (2.f * kLog2e) - (t - kMagic);
  vf p = splat(kExp2[5]);
  TW_UNROLL for (int c = 4; c >= 0; c--) p = p * f + splat(kExp2[c]);
  const vf e = power_of_two(t) * (p * f) + (power_of_two(t) - 1.f), y = e / (e + 2.f), r = 2.f / (e + 2.f);
  slope = size > splat(43.f) ? vf{} : r * (2.f - r);
  return (vf)((vi)y | sign);
}

TW_INLINE vf tanh_of(vf x) {
  vf slope;
  return tanh_of(x, slope);
}

// log(x) for normal x > 0 (a sum of exponentials): x = 2^n m with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh((m - 1) / (m + 1)).
TW_INLINE vf log_of(vf x) {
  const vi shifted = (vi)x - splat((int32_t)0x3f3504f3), n = shifted >> 23;
  const vf m = (vf)((vi)x - (n << 23)), r = (m - 1.f) / (m + 1.f), r2 = r * r;
  vf p = splat(2.f / 9.f) * r2 + splat(2.f / 7.f);
  p = p * r2 + splat(2.f / 5.f);
  p = p * r2 + splat(2.f / 3.f);
  const vf log_m = r * r2 * p + r * 2.f, nf = __builtin_convertvector(n, vf);
  const vf y = nf * 0.693359375f + (nf * -2.12194440e-4f + log_m);
  return x < splat(kInf) ? y : x;  // inf and NaN come through
}

}  // namespace TW_NAMESPACE
