#include "kv_write.h"

namespace qwen_mtp {
namespace {

void put(float* to, const float* from, int64_t dim) { std::memcpy(to, from, dim * sizeof(float)); }

void put(Half* to, const float* from, int64_t dim) {
  for (int64_t d = 0; d < dim; d += vec::kLanes) vec::store(to + d, vec::load(from + d, dim - d), dim - d);
}

}  // namespace

template <class T>
KvWrite<T>::KvWrite(const Attributes& a)
    : batch_(a.integer("B")),
      rows_(a.integer("R")),
      heads_(a.integer("Nkv")),
      dim_(a.integer("D")),
      slots_(a.integer("slots")),
      block_(a.integer("block_size")) {}

template <class T>
void KvWrite<T>::run(const Context& context) const {
  write(context, 0);
  write(context, 1);
}

template <class T>
void KvWrite<T>::write(const Context& context, size_t which) const {
  const float* fresh = context.input<float>(which);
  const T* before = context.input<T>(2 + which);
  const int32_t* table = context.input<int32_t>(4);
  const int32_t* start = context.input<int32_t>(5);
  const int32_t* count = context.input<int32_t>(6);
  const int64_t width = context.dimension(4, 1);
  T* pool = context.output<T>(which, {heads_, slots_, dim_});
  if (pool != before) std::memcpy(pool, before, heads_ * slots_ * dim_ * sizeof(T));
  for (int64_t b = 0; b < batch_; ++b) {
    for (int64_t r = 0; r < rows_ && r < count[b]; ++r) {
      const int64_t position = start[b] + r, page = position / block_;
      const int64_t block = page < width ? table[b * width + page] : 0;
      if (block <= 0) continue;
      const int64_t slot = block * block_ + position % block_;
      for (int64_t h = 0; h < heads_; ++h) {
        put(pool + (h * slots_ + slot) * dim_, fresh + ((b * rows_ + r) * heads_ + h) * dim_, dim_);
      }
    }
  }
}

template class KvWrite<float>;
template class KvWrite<Half>;

}  // namespace qwen_mtp
