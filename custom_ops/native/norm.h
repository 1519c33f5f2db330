// Root-mean-square norm over the last axis (custom_ops/norm.py).
#pragma once

#include "kernel.h"

namespace qwen_mtp {

class RMSNorm {
 public:
  static constexpr const char* kName = "RMSNorm";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit RMSNorm(const Attributes& a);
  void run(const Context& context) const;

 private:
  int64_t rows_, width_;
  float epsilon_;
};

// The sum of two rows, and its norm.
class AddNorm {
 public:
  static constexpr const char* kName = "AddNorm";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat, ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit AddNorm(const Attributes& a);
  void run(const Context& context) const;

 private:
  int64_t rows_, width_;
  float epsilon_;
};

}  // namespace qwen_mtp
