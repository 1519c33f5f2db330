#include <cmath>

#include "linear.h"
#include "linear_rows.h"

namespace qwen_mtp {
namespace {

constexpr int64_t kBlock = 32;  // inputs that share a scale

// Rows rounded to int8 in blocks of 32 and laid out as the packed weights are: of 64 inputs first
// those in low nibbles, then those in high ones. `offsets` undoes the 8 that is added to weights.
struct BlockRows {
  int8_t* values;    // [rows, stride]
  float* scales;     // [rows, blocks]
  int32_t* offsets;  // [rows, blocks]: -8 times the sum of the block
  int64_t stride, blocks;
};

BlockRows round_blocks(const float* x, const LiveRows& live, int64_t inputs) {
  const int64_t rows = live.count;
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
      const float* in = x + live.index[m] * inputs + b * kBlock;
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
  const LiveRows& live;
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
    unrolled<kRows>([&](auto i) { out[live.index[m + i] * outputs + n] = _mm512_reduce_add_ps(acc[i]); });
  }

  void channels(int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      for (int64_t m = 0; m < live.count; m += kTileRows) {
        switch (std::min<int64_t>(kTileRows, live.count - m)) {
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
  void channels(int64_t first, int64_t last) const {
    for (int64_t n = first; n < last; ++n) {
      for (int64_t m = 0; m < live.count; ++m) {
        float total = 0.0f;
        for (int64_t b = 0; b < blocks; ++b) {
          const uint8_t* w = packed + (n * blocks + b) * 16;
          const int8_t* x = r.values + m * r.stride + (b / 4) * 4 * kBlock + (b % 4) * 16;
          int32_t sum = r.offsets[m * r.blocks + b];
          for (int i = 0; i < 16; ++i) sum += (w[i] & 15) * x[i] + (w[i] >> 4) * x[i + 64];
          total += static_cast<float>(sum) * (scale[n * blocks + b] * r.scales[m * r.blocks + b]);
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
  const BlockRows r = round_blocks(x, live, inputs_);
  const Product4 product{r, live, context.input<uint8_t>(1), context.input<float>(2),
                         output(context, batch_, rows_, outputs_), inputs_ / kBlock, outputs_};
  share(context, product, inputs_ * 5 / 8);
}

}  // namespace qwen_mtp
