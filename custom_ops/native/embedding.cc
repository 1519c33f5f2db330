#include "embedding.h"

#include <algorithm>

namespace qwen_mtp {

void EmbeddingInt8::run(const Context& context) const {
  const int32_t* ids = context.input<int32_t>(0);
  const int8_t* table = context.input<int8_t>(1);
  const float* scales = context.input<float>(2);
  float* out = context.output<float>(0, {rows_, width_});
  for (int64_t m = 0; m < rows_; ++m, out += width_) {
    if (ids[m] < 0) {
      std::fill_n(out, width_, 0.0f);
      continue;
    }
    const int8_t* row = table + static_cast<int64_t>(ids[m]) * width_;
    const float scale = scales[ids[m]];
    for (int64_t i = 0; i < width_; ++i) out[i] = static_cast<float>(row[i]) * scale;
  }
}

void EmbeddingInt4::run(const Context& context) const {
  const int32_t* ids = context.input<int32_t>(0);
  const uint8_t* table = context.input<uint8_t>(1);
  const float* scales = context.input<float>(2);
  float* out = context.output<float>(0, {rows_, width_});
  for (int64_t m = 0; m < rows_; ++m, out += width_) {
    if (ids[m] < 0) {
      std::fill_n(out, width_, 0.0f);
      continue;
    }
    const uint8_t* row = table + static_cast<int64_t>(ids[m]) * (width_ / 2);
    const float* scale = scales + static_cast<int64_t>(ids[m]) * (width_ / 32);
    for (int64_t i = 0; i < width_; i += 2) {
      out[i] = static_cast<float>((row[i / 2] & 15) - 8) * scale[i / 32];
      out[i + 1] = static_cast<float>((row[i / 2] >> 4) - 8) * scale[i / 32];
    }
  }
}

}  // namespace qwen_mtp
