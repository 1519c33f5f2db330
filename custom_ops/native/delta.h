// Gated DeltaNet between its projections, and the gate of the MLP.
#pragma once

#include "kernel.h"

namespace qwen_mtp {

// What is static about a layer, as attributes of its nodes.
struct DeltaSizes {
  int64_t rows;       // of a slot
  int64_t key_heads, heads;
  int64_t key_dim, value_dim;
  int64_t taps;       // of the convolution
  float eps;          // of the output norm
  bool silu;          // the output gate; a sigmoid otherwise

  explicit DeltaSizes(const Attributes& a);
  int64_t ratio() const { return heads / key_heads; }
  int64_t key_size() const { return key_heads * key_dim; }
  int64_t value_size() const { return heads * value_dim; }
  int64_t channels() const { return 2 * key_size() + value_size(); }
};

// Commit the accepted rows of the last round, then run R rows (custom_ops/delta_round.py).
class DeltaRound {
 public:
  static constexpr const char* kName = "DeltaRound";
  static constexpr ort::Type kInputs[] = {
      ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat,
      ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kInt32};
  static constexpr ort::Type kOutputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat,
                                           ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit DeltaRound(const Attributes& a);
  void run(const Context& context) const;

 private:
  DeltaSizes sizes_;
  int64_t batch_, kept_;  // slots, rows of the stash
};

// Run the first rows of a chunk of one sequence; the others reach nothing.
class DeltaChunk {
 public:
  static constexpr const char* kName = "DeltaChunk";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat,
                                          ort::kFloat, ort::kFloat, ort::kFloat,
                                          ort::kFloat, ort::kFloat, ort::kInt32};
  static constexpr ort::Type kOutputs[] = {ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr uint32_t kOptional = 0;
  explicit DeltaChunk(const Attributes& a);
  void run(const Context& context) const;

 private:
  DeltaSizes sizes_;
};

}  // namespace qwen_mtp
