// From one projected row to query, key, value and gate (custom_ops/attention_project.py).
#pragma once

#include "kernel.h"

namespace qwen_mtp {

// Rows `[B * R, (2 * Nh + 2 * Nkv) * D]`, norm weights `[D]`, cosines and sines `[B, R, half]`.
class AttentionProject {
 public:
  static constexpr const char* kName = "AttentionProject";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit AttentionProject(const Attributes& a);
  void run(const Context& context) const;

 private:
  struct Turn {
    const float *cos, *sin;
  };
  void leave(const float* x, const float* weight, Turn turn, float* out) const;
  int64_t batch_, rows_, heads_, kv_heads_, dim_, half_;
  float eps_;
};

}  // namespace qwen_mtp
