#include "attention_project.h"

#include <algorithm>
#include <cmath>

#include "math.h"

namespace qwen_mtp {
namespace {

using vec::Floats;
using vec::kLanes;

constexpr int64_t kAlone = 16 << 10;  // values that one thread is through with before others wake

}  // namespace

AttentionProject::AttentionProject(const Attributes& a)
    : batch_(a.integer("B")),
      rows_(a.integer("R")),
      heads_(a.integer("Nh")),
      kv_heads_(a.integer("Nkv")),
      dim_(a.integer("D")),
      half_(a.integer("half")),
      eps_(a.number("epsilon")) {}

// One head: normalised, then its first 2 * half dimensions rotated.
void AttentionProject::leave(const float* x, const float* weight, Turn turn, float* out) const {
  Floats squares = vec::fill(0.0f);
  for (int64_t d = 0; d < dim_; d += kLanes) {
    const Floats v = vec::load(x + d, dim_ - d);
    squares = vec::fma(v, v, squares);
  }
  const float root = std::sqrt(vec::sum(squares) / static_cast<float>(dim_) + eps_);
  const Floats scale = vec::fill(1.0f / root);
  for (int64_t d = 0; d < dim_; d += kLanes) {
    const Floats v = vec::load(x + d, dim_ - d) * scale;
    vec::store(out + d, v * vec::load(weight + d, dim_ - d), dim_ - d);
  }
  for (int64_t d = 0; d < half_; d += kLanes) {
    const int64_t live = half_ - d;
    const Floats c = vec::load(turn.cos + d, live), s = vec::load(turn.sin + d, live);
    const Floats low = vec::load(out + d, live), high = vec::load(out + half_ + d, live);
    vec::store(out + d, low * c - high * s, live);
    vec::store(out + half_ + d, high * c + low * s, live);
  }
}

void AttentionProject::run(const Context& context) const {
  const float* all = context.input<float>(0);
  const float* query_weight = context.input<float>(1);
  const float* key_weight = context.input<float>(2);
  const float* cos = context.input<float>(3);
  const float* sin = context.input<float>(4);
  float* query = context.output<float>(0, {batch_, rows_, heads_, dim_});
  float* key = context.output<float>(1, {batch_, rows_, kv_heads_, dim_});
  float* value = context.output<float>(2, {batch_, rows_, kv_heads_, dim_});
  float* gate = context.output<float>(3, {batch_, rows_, heads_ * dim_});
  const int64_t stored = kv_heads_ * dim_, width = 2 * heads_ * dim_ + 2 * stored;
  const auto row = [&](size_t i) {
    const int64_t m = static_cast<int64_t>(i);
    const float* x = all + m * width;
    const Turn turn{cos + m * half_, sin + m * half_};
    for (int64_t h = 0; h < heads_; ++h, x += 2 * dim_) {  // a gate follows its query
      const int64_t at = (m * heads_ + h) * dim_;
      leave(x, query_weight, turn, query + at);
      std::copy_n(x + dim_, dim_, gate + at);
    }
    for (int64_t h = 0; h < kv_heads_; ++h, x += dim_) {
      leave(x, key_weight, turn, key + m * stored + h * dim_);
    }
    std::copy_n(x, stored, value + m * stored);
  };
  const int64_t count = batch_ * rows_;
  if (count * width > kAlone) return context.parallel(count, row);
  for (int64_t m = 0; m < count; ++m) row(m);
}

}  // namespace qwen_mtp
