// Products of a few rows with a matrix that is read once, in the two integer formats.
#pragma once

#include "kernel.h"

namespace qwen_mtp {

// Rows of zeros are not multiplied: absent tokens are read as such, so idle slots and the padding
// of a chunk cost nothing. `B` > 0 is the first dimension of an output `[B, M / B, N]`.

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
  int64_t rows_, inputs_, outputs_, batch_;
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
  int64_t rows_, inputs_, outputs_, batch_;
};

}  // namespace qwen_mtp
