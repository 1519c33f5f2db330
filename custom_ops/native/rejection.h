// Rejection sampling (custom_ops/rejection.py) and the argmax of a drafter.
#pragma once

#include "kernel.h"

namespace qwen_mtp {

// `[B, R, V]` logits and what every slot asks, to tokens `[B, R]` and accepted drafts `[B]`.
class RejectionSample {
 public:
  static constexpr const char* kName = "RejectionSample";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kInt32, ort::kInt32, ort::kFloat, ort::kFloat,
                                          ort::kFloat, ort::kInt32, ort::kFloat, ort::kInt32, ort::kInt32};
  static constexpr ort::Type kOutputs[] = {ort::kInt32, ort::kInt32};
  static constexpr uint32_t kOptional = 0;
  explicit RejectionSample(const Attributes&) {}
  void run(const Context& context) const;
};

// `[B, N]` to the place of the largest entry of each row, the first of several, as int64.
class ArgMaxRows {
 public:
  static constexpr const char* kName = "ArgMaxRows";
  static constexpr ort::Type kInputs[] = {ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kInt64};
  static constexpr uint32_t kOptional = 0;
  explicit ArgMaxRows(const Attributes&) {}
  void run(const Context& context) const;
};

}  // namespace qwen_mtp
