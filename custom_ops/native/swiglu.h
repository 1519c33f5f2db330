// The gate of the MLP (custom_ops/swiglu.py).
#pragma once

#include "kernel.h"

namespace qwen_mtp {

// `[M, 2 I]`, the gate first, to `[M, I]`.
class SwiGLU {
 public:
  static constexpr const char* kName = "SwiGLU";
  static constexpr ort::Type kInputs[] = {ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit SwiGLU(const Attributes& a) : rows_(a.integer("M")), width_(a.integer("I")) {}
  void run(const Context& context) const;

 private:
  int64_t rows_, width_;
};

}  // namespace qwen_mtp
