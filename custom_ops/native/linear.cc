#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define QWEN_MTP_VNNI 1
#endif

namespace qwen_mtp {
namespace {

constexpr int64_t kBlock = 32;      // inputs that share a scale in the 4-bit format
constexpr int kTileRows = 6;        // rows that meet a weight while it is in a register
constexpr int kTileOutputs = 4;
constexpr int64_t kAhead = 8 << 10;  // bytes that are fetched ahead: the rows of a tile confuse the hardware

// `f` for 0 .. kCount - 1 as constants: arrays of vectors stay in registers only when no loop is
// left around them.
template <int kCount, class F>
__attribute__((always_inline)) inline void unrolled(F&& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

#ifdef QWEN_MTP_VNNI
// Adds products of four unsigned with four signed bytes to each lane. As a builtin it costs GCC a
// copy of the sum each time.
inline __m512i dot(__m512i sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
  return sum;
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

int64_t padded(int64_t count) { return (count + 63) & ~int64_t{63}; }

// The largest magnitude, by its bits: a NaN is larger than any number and is kept.
float magnitude(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    most = std::max(most, bits & 0x7fffffffu);
  }
  float value;
  std::memcpy(&value, &most, 4);
  return value;
}

QuantizedRows quantize(const float* x, int64_t rows, int64_t inputs) {
  const int64_t stride = padded(inputs);
  QuantizedRows q{scratch<uint8_t>(0, rows * stride), scratch<float>(1, rows), stride};
  for (int64_t m = 0; m < rows; ++m) {
    const float* row = x + m * inputs;
    uint8_t* out = q.values + m * stride;
    const float scale = magnitude(row, inputs) / 127.0f;
    q.scales[m] = scale;
    if (!(scale > 0.0f)) {  // zeros, or a NaN that the scale carries on
      std::memset(out, 128, stride);
      continue;
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
  }
  return q;
}

struct Product8 {
  const QuantizedRows& q;
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
        if (fetched >> j & 1) _mm_prefetch(w + j * width + k + kAhead, _MM_HINT_T0);
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
      float* to = out + (m + i) * outputs + n;
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

  void channels(int64_t rows, int64_t first, int64_t last) const {
    int64_t n = first;
    for (; n + kTileOutputs <= last; n += kTileOutputs) all_rows<kTileOutputs>(rows, n);
    for (; n < last; ++n) all_rows<1>(rows, n);
  }
#else
  void channels(int64_t rows, int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      const int8_t* w = weight + n * inputs;
      for (int64_t m = 0; m < rows; ++m) {
        const uint8_t* x = q.values + m * q.stride;
        int32_t sum = 0;
        for (int64_t k = 0; k < inputs; ++k) sum += (static_cast<int32_t>(x[k]) - 128) * w[k];
        out[m * outputs + n] = leave(sum, m, n);
      }
    }
  }
#endif
};

// Rows rounded to int8 in blocks of 32 and laid out as the packed weights are: of 64 inputs first
// those in low nibbles, then those in high ones. `offsets` undoes the 8 that is added to weights.
struct BlockRows {
  int8_t* values;    // [rows, stride]
  float* scales;     // [rows, blocks]
  int32_t* offsets;  // [rows, blocks]: -8 times the sum of the block
  int64_t stride, blocks;
};

BlockRows round_blocks(const float* x, int64_t rows, int64_t inputs) {
  const int64_t blocks = inputs / kBlock, wide = (blocks + 3) & ~int64_t{3};
  BlockRows r{scratch<int8_t>(0, rows * wide * kBlock), scratch<float>(1, rows * wide),
              scratch<int32_t>(2, rows * wide), wide * kBlock, wide};
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t b = 0; b < wide; ++b) {
      // Four blocks share two vectors: the even inputs of all four, then the odd ones.
      int8_t* even = r.values + m * r.stride + (b / 4) * 4 * kBlock + (b % 4) * 16;
      int8_t* odd = even + 64;
      float& scale = r.scales[m * wide + b];
      int32_t sum = 0;
      const float* in = x + m * inputs + b * kBlock;
      scale = b < blocks ? magnitude(in, kBlock) / 127.0f : 0.0f;
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      if (!(scale > 0.0f)) {
        std::memset(even, 0, 16);
        std::memset(odd, 0, 16);
      } else {
        for (int i = 0; i < 16; ++i) {
          even[i] = static_cast<int8_t>(static_cast<int>(std::nearbyint(in[2 * i] * inverse)));
          odd[i] = static_cast<int8_t>(static_cast<int>(std::nearbyint(in[2 * i + 1] * inverse)));
          sum += even[i] + odd[i];
        }
      }
      r.offsets[m * wide + b] = -8 * sum;
    }
  }
  return r;
}

struct Product4 {
  const BlockRows& r;
  const uint8_t* packed;
  const float* scale;
  float* out;
  int64_t blocks, outputs;

#ifdef QWEN_MTP_VNNI
  template <int kRows>
  void tile(int64_t m, int64_t n) const {
    __m512 acc[kRows];
    unrolled<kRows>([&](auto i) { acc[i] = _mm512_setzero_ps(); });
    const __m512i low = _mm512_set1_epi8(15);
    // A block is four lanes: scales are spread over them, offsets go to the first of them.
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __mmask16 first = 0x1111;
    const uint8_t* w = packed + n * blocks * 16;
    const float* s = scale + n * blocks;
    const int64_t count = blocks, wide = r.blocks, stride = r.stride;
    const int8_t* values = r.values + m * stride;
    const int32_t* offsets = r.offsets + m * wide;
    const float* scales = r.scales + m * wide;
    for (int64_t b = 0; b < count; b += 4) {
      const int64_t left = std::min<int64_t>(4, count - b);
      const __mmask8 live = static_cast<__mmask8>((1u << left) - 1);
      const __mmask64 bytes = left == 4 ? ~0ull : (1ull << (16 * left)) - 1;
      const __m512i both = _mm512_maskz_loadu_epi8(bytes, w + b * 16);
      const __m512i even = _mm512_and_si512(both, low);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      const __m512 ws = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_maskz_loadu_ps(live, s + b)));
      unrolled<kRows>([&](auto i) {
        const int8_t* x = values + i * stride + b * kBlock;
        const int64_t at = i * wide + b;
        __m512i sum = _mm512_maskz_permutexvar_epi32(
            first, spread, _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(offsets + at))));
        sum = dot(sum, even, _mm512_load_si512(x));
        sum = dot(sum, odd, _mm512_load_si512(x + 64));
        const __m512 xs = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_load_ps(scales + at)));
        acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(ws, xs), acc[i]);
      });
    }
    unrolled<kRows>([&](auto i) { out[(m + i) * outputs + n] = _mm512_reduce_add_ps(acc[i]); });
  }

  void channels(int64_t rows, int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      for (int64_t m = 0; m < rows; m += kTileRows) {
        switch (std::min<int64_t>(kTileRows, rows - m)) {
          case 1: tile<1>(m, n); break;
          case 2: tile<2>(m, n); break;
          case 3: tile<3>(m, n); break;
          case 4: tile<4>(m, n); break;
          case 5: tile<5>(m, n); break;
          default: tile<6>(m, n); break;
        }
      }
    }
  }
#else
  void channels(int64_t rows, int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      for (int64_t m = 0; m < rows; ++m) {
        float total = 0.0f;
        for (int64_t b = 0; b < blocks; ++b) {
          const uint8_t* w = packed + (n * blocks + b) * 16;
          const int8_t* x = r.values + m * r.stride + (b / 4) * 4 * kBlock + (b % 4) * 16;
          int32_t sum = r.offsets[m * r.blocks + b];
          for (int i = 0; i < 16; ++i) sum += (w[i] & 15) * x[i] + (w[i] >> 4) * x[i + 64];
          total += static_cast<float>(sum) * (scale[n * blocks + b] * r.scales[m * r.blocks + b]);
        }
        out[m * outputs + n] = total;
      }
    }
  }
#endif
};

// Share the channels among the threads in strips of whole tiles.
template <class Product>
void share(const Context& context, const Product& product, int64_t rows, int64_t outputs, int64_t channel_bytes) {
  int64_t step = std::max<int64_t>(kTileOutputs, kTaskBytes / channel_bytes / kTileOutputs * kTileOutputs);
  context.parallel((outputs + step - 1) / step, [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * step;
    product.channels(rows, first, std::min(first + step, outputs));
  });
}

}  // namespace

LinearInt8::LinearInt8(const Attributes& a)
    : rows_(a.integer("M")), inputs_(a.integer("K")), outputs_(a.integer("N")) {}

void LinearInt8::run(const Context& context) const {
  const QuantizedRows q = quantize(context.input<float>(0), rows_, inputs_);
  const Product8 product{q, context.input<int8_t>(1), context.input<float>(2),
                         context.output<float>(0, {rows_, outputs_}), inputs_, outputs_};
  share(context, product, rows_, outputs_, inputs_);
}

LinearInt4::LinearInt4(const Attributes& a)
    : rows_(a.integer("M")), inputs_(a.integer("K")), outputs_(a.integer("N")) {}

void LinearInt4::run(const Context& context) const {
  const BlockRows r = round_blocks(context.input<float>(0), rows_, inputs_);
  const Product4 product{r, context.input<uint8_t>(1), context.input<float>(2),
                         context.output<float>(0, {rows_, outputs_}), inputs_ / kBlock, outputs_};
  share(context, product, rows_, outputs_, inputs_ * 5 / 8);
}

}  // namespace qwen_mtp
