// What the integer products share: rows, tiles and strips of channels.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernel.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define QWEN_MTP_VNNI 1
#endif

namespace qwen_mtp {

// Weights a task reads: large enough to hide the start of a task, small enough to share evenly.
constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kTaskValues = 32 << 10;  // values to round that are worth a task
constexpr int kTileRows = 6;  // rows that meet a weight while it is in a register
constexpr int kTileOutputs = 4;

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

#endif

// Which rows are multiplied, in order; the others are zeros.
struct LiveRows {
  const int32_t* index;
  int64_t count, all;

  LiveRows(const float* x, int64_t rows, int64_t inputs) : all(rows) {
    int32_t* live = scratch<int32_t>(3, rows);
    count = 0;
    for (int64_t m = 0; m < rows; ++m) {
      const float* row = x + m * inputs;
      if (std::any_of(row, row + inputs, [](float v) { return v != 0.0f; })) live[count++] = static_cast<int32_t>(m);
    }
    index = live;
  }

  // Calls `row(m)` for m < count, on several threads where there is enough to do.
  template <class Row>
  void each(const Context& context, int64_t inputs, const Row& row) const {
    const int64_t step = std::max<int64_t>(1, kTaskValues / inputs), tasks = (count + step - 1) / step;
    if (count > 0) {
      context.parallel(tasks, [&](size_t i) {
        const int64_t first = static_cast<int64_t>(i) * step;
        for (int64_t m = first; m < std::min(count, first + step); ++m) row(m);
      });
    }
  }

  // Zeros for the other rows, in columns first .. last - 1 of `[all, outputs]`.
  void clear_others(float* out, int64_t outputs, int64_t first, int64_t last) const {
    for (int64_t m = 0, next = 0; m < all; ++m) {
      if (next < count && index[next] == m) {
        ++next;
      } else {
        std::fill(out + m * outputs + first, out + m * outputs + last, 0.0f);
      }
    }
  }
};

// The largest magnitude, by its bits: a NaN is larger than any number and is kept.
inline float magnitude(const float* x, int64_t count) {
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

// Share the channels among the threads in strips of whole tiles.
template <class Product>
void share(const Context& context, const Product& product, int64_t channel_bytes) {
  const int64_t outputs = product.outputs;
  const int64_t step = std::max<int64_t>(kTileOutputs, kTaskBytes / channel_bytes / kTileOutputs * kTileOutputs);
  context.parallel((outputs + step - 1) / step, [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * step, last = std::min(first + step, outputs);
    product.live.clear_others(product.out, outputs, first, last);
    if (product.live.count > 0) product.channels(first, last);
  });
}

inline float* output(const Context& context, int64_t batch, int64_t rows, int64_t outputs) {
  if (batch == 0) return context.output<float>(0, {rows, outputs});
  return context.output<float>(0, {batch, rows / batch, outputs});
}

}  // namespace qwen_mtp
