// Storing new keys and values (custom_ops/attention.py, kv_write).
#pragma once

#include "half.h"
#include "kernel.h"

namespace qwen_mtp {

template <class T>
struct Stored;
template <>
struct Stored<float> {
  static constexpr ort::Type kType = ort::kFloat;
  static constexpr const char* kWrite = "KvWrite";
  static constexpr const char* kAttention = "PagedAttention";
};
template <>
struct Stored<Half> {
  static constexpr ort::Type kType = ort::kHalf;
  static constexpr const char* kWrite = "KvWriteHalf";
  static constexpr const char* kAttention = "PagedAttentionHalf";
};

// Keys and values `[B, R, Nkv, D]` into pools `[Nkv, slots, D]` of T: in place where a pool is
// bound to one buffer as input and output, else into a copy. A row that is not kept is not written.
template <class T>
class KvWrite {
 public:
  static constexpr const char* kName = Stored<T>::kWrite;
  static constexpr ort::Type kInputs[] = {ort::kFloat,        ort::kFloat, Stored<T>::kType, Stored<T>::kType,
                                          ort::kInt32, ort::kInt32, ort::kInt32};
  static constexpr ort::Type kOutputs[] = {Stored<T>::kType, Stored<T>::kType};
  static constexpr uint32_t kOptional = 0;
  explicit KvWrite(const Attributes& a);
  void run(const Context& context) const;

 private:
  void write(const Context& context, size_t which) const;
  int64_t batch_, rows_, heads_, dim_, slots_, block_;
};

}  // namespace qwen_mtp
