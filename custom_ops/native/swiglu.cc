#include "swiglu.h"

#include <algorithm>

#include "math.h"

namespace qwen_mtp {
namespace {

constexpr int64_t kStrip = 4096;  // columns of a task

}  // namespace

void SwiGLU::run(const Context& context) const {
  const float* gate_up = context.input<float>(0);
  float* out = context.output<float>(0, {rows_, width_});
  const int64_t strips = (width_ + kStrip - 1) / kStrip;
  context.parallel(rows_ * strips, [&](size_t task) {
    const int64_t row = static_cast<int64_t>(task) / strips;
    const int64_t first = static_cast<int64_t>(task) % strips * kStrip;
    const int64_t last = std::min(first + kStrip, width_);
    const float *gate = gate_up + row * 2 * width_, *up = gate + width_;
    float* to = out + row * width_;
    for (int64_t i = first; i < last; i += vec::kLanes) {
      const int64_t live = last - i;
      vec::store(to + i, vec::silu(vec::load(gate + i, live)) * vec::load(up + i, live), live);
    }
  });
}

}  // namespace qwen_mtp
