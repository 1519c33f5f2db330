// Rows of a quantised vocabulary (custom_ops/linear.py, embedding_int8 and embedding_int4). An absent
// token, a negative id, reads zeros: products skip its row.
#pragma once

#include "kernel.h"

namespace qwen_mtp {

class EmbeddingInt8 {
 public:
  static constexpr const char* kName = "EmbeddingInt8";
  static constexpr ort::Type kInputs[] = {ort::kInt32, ort::kInt8, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit EmbeddingInt8(const Attributes& a) : rows_(a.integer("M")), width_(a.integer("D")) {}
  void run(const Context& context) const;

 private:
  int64_t rows_, width_;
};

class EmbeddingInt4 {
 public:
  static constexpr const char* kName = "EmbeddingInt4";
  static constexpr ort::Type kInputs[] = {ort::kInt32, ort::kUint8, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit EmbeddingInt4(const Attributes& a) : rows_(a.integer("M")), width_(a.integer("D")) {}
  void run(const Context& context) const;

 private:
  int64_t rows_, width_;
};

}  // namespace qwen_mtp
