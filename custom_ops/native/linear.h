// Products of a few rows with a matrix that is read once, in the two integer formats.
#pragma once

#include "kernel.h"

namespace qwen_mtp {

// Weights a task reads: large enough to hide the start of a task, small enough to share evenly.
constexpr int64_t kTaskBytes = 64 << 10;

// Rows quantised to uint8 around 128, `stride` bytes apart (padded with the zero point).
struct QuantizedRows {
  uint8_t* values;
  float* scales;
  int64_t stride;
};

// `[M, K]` by int8 `[N, K]` with one scale a channel (custom_ops/linear.py, linear_int8_rows).
class LinearInt8 {
 public:
  static constexpr const char* kName = "LinearInt8";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kInt8, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit LinearInt8(const Attributes& a);
  void run(const Context& context) const;

 private:
  int64_t rows_, inputs_, outputs_;
};

// `[M, K]` by 4-bit blocks `[N, K / 32, 16]` with one scale a block (linear_int4).
class LinearInt4 {
 public:
  static constexpr const char* kName = "LinearInt4";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kUint8, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit LinearInt4(const Attributes& a);
  void run(const Context& context) const;

 private:
  int64_t rows_, inputs_, outputs_;
};

}  // namespace qwen_mtp
