#include <cmath>

#include "linear.h"
#include "linear_rows.h"

namespace qwen_mtp {
namespace {

constexpr int64_t kBlock = 32;  // inputs that share a scale
constexpr int kPair = 2;        // channels that share what is read of a row
constexpr int64_t kNear = 4 << 10;  // bytes fetched ahead

// Four blocks are a vector of packed weights, and four lanes of it are a block. Rows are rounded to
// int8 in blocks and laid out to match: of 128 inputs first those in low nibbles, then those in high
// ones; scales stand in all four lanes of their block, `offsets` in its first. They undo the 8 that
// is added to weights.
struct BlockRows {
  int8_t* values;    // [rows, 128 * groups]
  float* scales;     // [rows, 16 * groups]
  int32_t* offsets;  // [rows, 16 * groups]: -8 times the sum of the block
  int64_t groups;
};

#ifdef QWEN_MTP_VNNI
int32_t round_block(const float* in, float inverse, int8_t* even, int8_t* odd) {
  const __m512 by = _mm512_set1_ps(inverse);
  const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(in), by));
  const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(in + 16), by));
  const __m512i pick = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i evens = _mm512_permutex2var_epi32(a, pick, b);
  const __m512i odds = _mm512_permutex2var_epi32(a, _mm512_add_epi32(pick, _mm512_set1_epi32(1)), b);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(even), _mm512_cvtepi32_epi8(evens));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(odd), _mm512_cvtepi32_epi8(odds));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}
#else
int32_t round_block(const float* in, float inverse, int8_t* even, int8_t* odd) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    even[i] = static_cast<int8_t>(static_cast<int>(std::nearbyint(in[2 * i] * inverse)));
    odd[i] = static_cast<int8_t>(static_cast<int>(std::nearbyint(in[2 * i + 1] * inverse)));
    sum += even[i] + odd[i];
  }
  return sum;
}
#endif

BlockRows round_blocks(const Context& context, const float* x, const LiveRows& live, int64_t inputs) {
  const int64_t rows = live.count, blocks = inputs / kBlock, groups = (blocks + 3) / 4;
  const BlockRows r{scratch<int8_t>(0, rows * groups * 128), scratch<float>(1, rows * groups * 16),
                    scratch<int32_t>(2, rows * groups * 16), groups};
  live.each(context, inputs, [&](int64_t m) {
    for (int64_t b = 0; b < groups * 4; ++b) {
      int8_t* even = r.values + (m * groups + b / 4) * 128 + (b % 4) * 16;
      const int64_t lane = (m * groups + b / 4) * 16 + (b % 4) * 4;
      const float* in = x + live.index[m] * inputs + b * kBlock;
      const float scale = b < blocks ? magnitude(in, kBlock) / 127.0f : 0.0f;
      int32_t sum = 0;
      if (scale > 0.0f) {
        sum = round_block(in, 1.0f / scale, even, even + 64);
      } else {  // zeros, or a NaN that the scale carries on
        std::memset(even, 0, 16);
        std::memset(even + 64, 0, 16);
      }
      std::fill_n(r.scales + lane, 4, scale);
      std::fill_n(r.offsets + lane, 4, 0);
      r.offsets[lane] = -8 * sum;
    }
  });
  return r;
}

struct Product4 {
  const BlockRows& r;
  const LiveRows& live;
  const uint8_t* packed;
  const float* scale;
  float* out;
  int64_t blocks, outputs;

#ifdef QWEN_MTP_VNNI
  template <int kRows, int kOuts>
  void tile(int64_t m, int64_t n) const {
    __m512 acc[kRows][kOuts];
    unrolled<kRows>([&](auto i) { unrolled<kOuts>([&](auto j) { acc[i][j] = _mm512_setzero_ps(); }); });
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const uint8_t* w = packed + n * blocks * 16;
    const float* s = scale + n * blocks;
    const int64_t count = blocks, groups = r.groups;
    const int8_t* values = r.values + m * groups * 128;
    const int32_t* offsets = r.offsets + m * groups * 16;
    const float* scales = r.scales + m * groups * 16;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t left = std::min<int64_t>(4, count - 4 * g);
      const __mmask8 live = static_cast<__mmask8>((1u << left) - 1);
      const __mmask64 bytes = left == 4 ? ~0ull : (1ull << (16 * left)) - 1;
      __m512i even[kOuts], odd[kOuts];
      __m512 ws[kOuts];
      unrolled<kOuts>([&](auto j) {
        const uint8_t* at = w + (j * count + 4 * g) * 16;
        _mm_prefetch(at + kNear, _MM_HINT_T0);
        const __m512i both = _mm512_maskz_loadu_epi8(bytes, at);
        even[j] = _mm512_and_si512(both, low);
        odd[j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        const __m128 four = _mm_maskz_loadu_ps(live, s + j * count + 4 * g);
        ws[j] = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(four));
      });
      unrolled<kRows>([&](auto i) {
        const int64_t at = i * groups + g;
        const __m512i x0 = _mm512_load_si512(values + at * 128), x1 = _mm512_load_si512(values + at * 128 + 64);
        const __m512i offset = _mm512_load_si512(offsets + at * 16);
        const __m512 xs = _mm512_load_ps(scales + at * 16);
        unrolled<kOuts>([&](auto j) {
          const __m512i sum = dot(dot(offset, even[j], x0), odd[j], x1);
          acc[i][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(ws[j], xs), acc[i][j]);
        });
      });
    }
    unrolled<kRows>([&](auto i) {
      float* to = out + live.index[m + i] * outputs + n;
      unrolled<kOuts>([&](auto j) { to[j] = _mm512_reduce_add_ps(acc[i][j]); });
    });
  }

  template <int kOuts>
  void all_rows(int64_t n) const {
    for (int64_t m = 0; m < live.count; m += kTileRows) {
      switch (std::min<int64_t>(kTileRows, live.count - m)) {
        case 1: tile<1, kOuts>(m, n); break;
        case 2: tile<2, kOuts>(m, n); break;
        case 3: tile<3, kOuts>(m, n); break;
        case 4: tile<4, kOuts>(m, n); break;
        case 5: tile<5, kOuts>(m, n); break;
        default: tile<6, kOuts>(m, n); break;
      }
    }
  }

  void channels(int64_t first, int64_t last) const {
    int64_t n = first;
    for (; n + kPair <= last; n += kPair) all_rows<kPair>(n);
    for (; n < last; ++n) all_rows<1>(n);
  }
#else
  void channels(int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      for (int64_t m = 0; m < live.count; ++m) {
        float total = 0.0f;
        for (int64_t b = 0; b < blocks; ++b) {
          const uint8_t* w = packed + (n * blocks + b) * 16;
          const int8_t* x = r.values + (m * r.groups + b / 4) * 128 + (b % 4) * 16;
          const int64_t lane = (m * r.groups + b / 4) * 16 + (b % 4) * 4;
          int32_t sum = r.offsets[lane];
          for (int i = 0; i < 16; ++i) sum += (w[i] & 15) * x[i] + (w[i] >> 4) * x[i + 64];
          total += static_cast<float>(sum) * (scale[n * blocks + b] * r.scales[lane]);
        }
        out[live.index[m] * outputs + n] = total;
      }
    }
  }
#endif
};

}  // namespace

LinearInt4::LinearInt4(const Attributes& a)
    : rows_(a.integer("M")), inputs_(a.integer("K")), outputs_(a.integer("N")), batch_(a.integer("B")) {}

void LinearInt4::run(const Context& context) const {
  const float* x = context.input<float>(0);
  const LiveRows live(x, rows_, inputs_);
  const BlockRows r = round_blocks(context, x, live, inputs_);
  const Product4 product{r, live, context.input<uint8_t>(1), context.input<float>(2),
                         output(context, batch_, rows_, outputs_), inputs_ / kBlock, outputs_};
  share(context, product, inputs_ * 5 / 8);
}

}  // namespace qwen_mtp
