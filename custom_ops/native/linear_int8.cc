#include <cmath>

#include "linear.h"
#include "linear_rows.h"

namespace qwen_mtp {
namespace {

// Bytes fetched ahead, into the first cache and the second: the rows of a tile confuse the hardware.
constexpr int64_t kNear = 4 << 10, kFar = 16 << 10;

int64_t padded(int64_t count) { return (count + 63) & ~int64_t{63}; }

#ifdef QWEN_MTP_VNNI
inline void fetch(const int8_t* at) {
  _mm_prefetch(at + kNear, _MM_HINT_T0);
  _mm_prefetch(at + kFar, _MM_HINT_T1);
}

// The sums of the lanes of four vectors.
inline __m128i lane_sums(const __m512i (&v)[4]) {
  const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}
#endif

// Rows quantised to uint8 around 128, `stride` bytes apart (padded with the zero point).
struct QuantizedRows {
  uint8_t* values;
  float* scales;
  int64_t stride;
};

QuantizedRows quantize(const Context& context, const float* x, const LiveRows& live, int64_t inputs) {
  const int64_t stride = padded(inputs);
  const QuantizedRows q{scratch<uint8_t>(0, live.count * stride), scratch<float>(1, live.count), stride};
  live.each(context, inputs, [&](int64_t m) {
    const float* row = x + live.index[m] * inputs;
    uint8_t* out = q.values + m * stride;
    const float scale = magnitude(row, inputs) / 127.0f;
    q.scales[m] = scale;
    if (!(scale > 0.0f)) {  // a NaN, which the scale carries on
      std::memset(out, 128, stride);
      return;
    }
    int64_t k = 0;
#ifdef QWEN_MTP_VNNI
    const __m512 divisor = _mm512_set1_ps(scale);
    for (; k + 16 <= inputs; k += 16) {
      const __m512i v = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(row + k), divisor));
      _mm_store_si128(reinterpret_cast<__m128i*>(out + k),
                      _mm512_cvtepi32_epi8(_mm512_add_epi32(v, _mm512_set1_epi32(128))));
    }
#endif
    for (; k < inputs; ++k) out[k] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(row[k] / scale)) + 128);
    std::memset(out + inputs, 128, stride - inputs);
  });
  return q;
}

struct Product8 {
  const QuantizedRows& q;
  const LiveRows& live;
  const int8_t* weight;
  const float* scale;
  float* out;
  int64_t inputs, outputs;

  float leave(int32_t sum, int64_t m, int64_t n) const {
    return static_cast<float>(sum) * scale[n] * q.scales[m];
  }

#ifdef QWEN_MTP_VNNI
  // `kRows` rows from m by `kOuts` channels from n; one row's sums never meet another's. `totals`
  // are 128 times the sums of the channels, which the zero point adds to each product: the first
  // rows leave them for the others.
  template <int kRows, int kOuts, bool kFirst>
  void tile(int64_t m, int64_t n, unsigned fetched, int32_t* totals) const {
    __m512i acc[kRows][kOuts], total[kOuts];
    unrolled<kOuts>([&](auto j) {
      total[j] = _mm512_setzero_si512();
      unrolled<kRows>([&](auto i) { acc[i][j] = _mm512_setzero_si512(); });
    });
    const __m512i zero_point = _mm512_set1_epi8(static_cast<char>(128));
    const int64_t stride = q.stride, width = inputs;
    const uint8_t* rows = q.values + m * stride;
    const int8_t* w = weight + n * width;
    const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
      __m512i v[kOuts];
      unrolled<kOuts>([&](auto j) {
        v[j] = load(w + j * width + k);
        if (fetched >> j & 1) fetch(w + j * width + k);
        if constexpr (kFirst) total[j] = dot(total[j], zero_point, v[j]);
      });
      unrolled<kRows>([&](auto i) {
        const __m512i x = _mm512_load_si512(rows + i * stride + k);
        unrolled<kOuts>([&](auto j) { acc[i][j] = dot(acc[i][j], x, v[j]); });
      });
    };
    int64_t k = 0;
    for (; k + 64 <= width; k += 64) step(k, [](const int8_t* at) { return _mm512_loadu_si512(at); });
    if (k < width) {
      const __mmask64 live = (1ull << (width - k)) - 1;
      step(k, [live](const int8_t* at) { return _mm512_maskz_loadu_epi8(live, at); });
    }
    if constexpr (kFirst) {
      unrolled<kOuts>([&](auto j) { totals[j] = _mm512_reduce_add_epi32(total[j]); });
    }
    unrolled<kRows>([&](auto i) {
      float* to = out + live.index[m + i] * outputs + n;
      if constexpr (kOuts == 4) {
        const __m128i sums = _mm_sub_epi32(lane_sums(acc[i]), _mm_loadu_si128(reinterpret_cast<__m128i*>(totals)));
        const __m128 scaled = _mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_loadu_ps(scale + n));
        _mm_storeu_ps(to, _mm_mul_ps(scaled, _mm_set1_ps(q.scales[m + i])));
      } else {
        unrolled<kOuts>([&](auto j) {
          to[j] = leave(_mm512_reduce_add_epi32(acc[i][j]) - totals[j], m + i, n + j);
        });
      }
    });
  }

  template <int kOuts, bool kFirst>
  void rows_from(int64_t m, int64_t count, int64_t n, unsigned fetched, int32_t* totals) const {
    switch (count) {
      case 1: return tile<1, kOuts, kFirst>(m, n, fetched, totals);
      case 2: return tile<2, kOuts, kFirst>(m, n, fetched, totals);
      case 3: return tile<3, kOuts, kFirst>(m, n, fetched, totals);
      case 4: return tile<4, kOuts, kFirst>(m, n, fetched, totals);
      case 5: return tile<5, kOuts, kFirst>(m, n, fetched, totals);
      default: return tile<6, kOuts, kFirst>(m, n, fetched, totals);
    }
  }

  // Rows in passes of about equal size; each pass fetches its part of the channels to come, so
  // that memory is busy in all of them.
  template <int kOuts>
  void all_rows(int64_t rows, int64_t n) const {
    int32_t totals[kOuts];
    const int64_t passes = (rows + kTileRows - 1) / kTileRows;
    int64_t m = 0;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t count = (rows - m + passes - pass - 1) / (passes - pass);
      unsigned fetched = 0;
      for (int j = 0; j < kOuts; ++j) fetched |= (j % passes == pass ? 1u : 0u) << j;
      if (pass == 0) {
        rows_from<kOuts, true>(m, count, n, fetched, totals);
      } else {
        rows_from<kOuts, false>(m, count, n, fetched, totals);
      }
      m += count;
    }
  }

  void channels(int64_t first, int64_t last) const {
    int64_t n = first;
    for (; n + kTileOutputs <= last; n += kTileOutputs) all_rows<kTileOutputs>(live.count, n);
    for (; n < last; ++n) all_rows<1>(live.count, n);
  }
#else
  void channels(int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      const int8_t* w = weight + n * inputs;
      for (int64_t m = 0; m < live.count; ++m) {
        const uint8_t* x = q.values + m * q.stride;
        int32_t sum = 0;
        for (int64_t k = 0; k < inputs; ++k) sum += (static_cast<int32_t>(x[k]) - 128) * w[k];
        out[live.index[m] * outputs + n] = leave(sum, m, n);
      }
    }
  }
#endif
};

}  // namespace

LinearInt8::LinearInt8(const Attributes& a)
    : rows_(a.integer("M")), inputs_(a.integer("K")), outputs_(a.integer("N")), batch_(a.integer("B")) {}

void LinearInt8::run(const Context& context) const {
  const float* x = context.input<float>(0);
  const LiveRows live(x, rows_, inputs_);
  const QuantizedRows q = quantize(context, x, live, inputs_);
  const Product8 product{q, live, context.input<int8_t>(1), context.input<float>(2),
                         output(context, batch_, rows_, outputs_), inputs_, outputs_};
  share(context, product, inputs_);
}

}  // namespace qwen_mtp
