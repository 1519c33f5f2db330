// Vectors of floats and the functions the kernels need of them.
//
// An element's result depends on that element alone, wherever it stands: the ends of rows are
// loaded as whole vectors with zeros behind them, never one by one. On a machine without any of
// the instruction sets named here the compiler makes do with what it has.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace qwen_mtp::vec {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Floats fill(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX__)
  return _mm256_set1_ps(x);
#elif defined(__SSE2__)
  return _mm_set1_ps(x);
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = x;
  return v;
#endif
}

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// The first `live` elements, zeros behind them.
inline Floats load(const float* from, int64_t live) {
  if (live >= kLanes) return load(from);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << live) - 1), from);
#else
  Floats v = fill(0.0f);
  std::memcpy(&v, from, live * sizeof(float));
  return v;
#endif
}

inline void store(float* to, Floats v, int64_t live) {
  if (live >= kLanes) return store(to, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << live) - 1), v);
#else
  std::memcpy(to, &v, live * sizeof(float));
#endif
}

// a * b + c, rounded once where the machine can.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__) && defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline float sum(Floats v) {
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where one is a NaN

// 2^n for whole n in -126..127.
inline Floats power_of_two(Ints n) {
  const Ints bits = (n + 127) << 23;
  Floats v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// Within one unit in the last place of e^x; a NaN stays one.
inline Floats exp(Floats x) {
  x = x > 89.0f ? fill(89.0f) : x;
  x = x < -104.0f ? fill(-104.0f) : x;
  // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits.
  const Floats magic = fill(12582912.0f);
  const Floats shifted = fma(x, fill(1.44269504f), magic);
  const Floats n = shifted - magic;
  // ln 2 in two parts, of which the first times n is exact.
  Floats r = fma(n, fill(-0.693359375f), x);
  r = fma(n, fill(2.12194440e-4f), r);
  // (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2, minimax in relative error of e^r.
  Floats p = fill(1.3814540579915047e-3f);
  p = fma(p, r, fill(8.36874544620514e-3f));
  p = fma(p, r, fill(4.166838899254799e-2f));
  p = fma(p, r, fill(1.666652113199234e-1f));
  p = fma(p, r, fill(4.999999403953552e-1f));
  p = fma(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  // In two steps: the ends of the range lie outside what one exponent can say.
  const Floats bounded = n == n ? n : fill(0.0f);
  const Ints whole = __builtin_convertvector(bounded, Ints);
  const Ints half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);
#endif
}

// log(1 + y) for y in 0..1, as 2 artanh(y / (2 + y)): within two units in the last place.
inline Floats log1p_unit(Floats y) {
  const Floats s = y / (y + 2.0f);
  const Floats z = s * s;
  Floats p = fill(2.801537811756134e-1f);
  p = fma(p, z, fill(2.8001171350479126e-1f));
  p = fma(p, z, fill(4.0021562576293945e-1f));
  p = fma(p, z, fill(6.66664183139801e-1f));
  return fma(p * z, s, s + s);
}

inline Floats sigmoid(Floats x) { return fill(1.0f) / (exp(-x) + 1.0f); }

inline Floats silu(Floats x) { return x / (exp(-x) + 1.0f); }

inline Floats softplus(Floats x) {
  const Floats zero = fill(0.0f);
  const Floats magnitude = x < zero ? -x : x;
  return larger(x, zero) + log1p_unit(exp(-magnitude));
}

}  // namespace qwen_mtp::vec
