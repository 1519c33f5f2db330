// Attention over the paged pools where they lie (custom_ops/attention.py, paged_attention).
#pragma once

#include "kv_write.h"

namespace qwen_mtp {

// What is static about a call.
struct AttentionSizes {
  int64_t batch, rows, heads, kv_heads, dim, slots, block, extra;
  int64_t group() const { return heads / kv_heads; }
};

// Queries `[B, R, Nh, D]`, pools `[Nkv, slots, D]` of T, table, start and count; then, each of
// them optional, a gate `[B, R, Nh * D]` and keys and values `[B, J, Nkv, D]` that all rows see.
// Without a gate `[B, R, Nh, D]`, with one `[B * R, Nh * D]` times its sigmoid. Rows from `count`
// on are zeros.
template <class T>
class PagedAttention {
 public:
  static constexpr const char* kName = Stored<T>::kAttention;
  static constexpr ort::Type kInputs[] = {ort::kFloat, Stored<T>::kType, Stored<T>::kType, ort::kInt32, ort::kInt32,
                                          ort::kInt32, ort::kFloat,      ort::kFloat,      ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr uint32_t kOptional = 0x1c0;
  explicit PagedAttention(const Attributes& a);
  void run(const Context& context) const;

 private:
  AttentionSizes sizes_;
};

}  // namespace qwen_mtp
