// 16-bit floats in memory: read and written as the vectors of 32-bit ones that are computed with.
#pragma once

#include "math.h"

namespace qwen_mtp {

struct Half {
  uint16_t bits;
};

// To the nearest, ties to even; too large is infinite, a NaN stays one.
inline Half narrow(float x) {
  uint32_t bits, half;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) {
    half = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (size < 0x38800000) {  // below the normal numbers: this sum is rounded as they are
    float shifted;
    std::memcpy(&shifted, &size, 4);
    shifted += 0.5f;
    std::memcpy(&half, &shifted, 4);
    half -= 0x3f000000;
  } else {
    half = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
  }
  return Half{static_cast<uint16_t>(sign | half)};
}

inline float widen(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16, size = h.bits & 0x7fff;
  const bool finite = size < 0x7c00;
  const uint32_t bits = sign | size << 13 | (finite ? 0 : 0x7f800000);
  float x;
  std::memcpy(&x, &bits, 4);
  return finite ? x * 0x1p112f : x;  // the exponents are biased by 15 and by 127
}

namespace vec {

inline Floats load(const Half* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = widen(from[i]);
  return v;
#endif
}

inline Floats load(const Half* from, int64_t live) {
  if (live >= kLanes) return load(from);
  Half all[kLanes] = {};
  std::memcpy(all, from, live * sizeof(Half));
  return load(all);
}

inline void store(Half* to, Floats v, int64_t live) {
  Half all[kLanes];
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(all), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) all[i] = narrow(v[i]);
#endif
  std::memcpy(to, all, (live < kLanes ? live : kLanes) * sizeof(Half));
}

}  // namespace vec
}  // namespace qwen_mtp
