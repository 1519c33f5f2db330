#include "norm.h"

#include <algorithm>
#include <cmath>

#include "math.h"

namespace qwen_mtp {
namespace {

constexpr int64_t kTaskValues = 1 << 15;  // values a task has to be worth its start

void normalise(const float* x, const float* weight, float* out, int64_t width, float epsilon) {
  vec::Floats squares = vec::fill(0.0f);
  for (int64_t i = 0; i < width; i += vec::kLanes) {
    const vec::Floats v = vec::load(x + i, width - i);
    squares = vec::fma(v, v, squares);
  }
  const float mean = vec::sum(squares) / static_cast<float>(width);
  const vec::Floats scale = vec::fill(1.0f / std::sqrt(mean + epsilon));
  for (int64_t i = 0; i < width; i += vec::kLanes) {
    const int64_t live = width - i;
    vec::store(out + i, vec::load(x + i, live) * scale * vec::load(weight + i, live), live);
  }
}

// Calls `row(m)` for every row, on several threads when there is enough to do.
template <class Row>
void each_row(const Context& context, int64_t rows, int64_t width, const Row& row) {
  const int64_t step = std::max<int64_t>(1, kTaskValues / width);
  context.parallel((rows + step - 1) / step, [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * step;
    for (int64_t m = first; m < std::min(rows, first + step); ++m) row(m);
  });
}

}  // namespace

RMSNorm::RMSNorm(const Attributes& a)
    : rows_(a.integer("M")), width_(a.integer("D")), epsilon_(a.number("epsilon")) {}

void RMSNorm::run(const Context& context) const {
  const float* x = context.input<float>(0);
  const float* weight = context.input<float>(1);
  float* out = context.output<float>(0, {rows_, width_});
  each_row(context, rows_, width_, [&](int64_t m) {
    normalise(x + m * width_, weight, out + m * width_, width_, epsilon_);
  });
}

AddNorm::AddNorm(const Attributes& a)
    : rows_(a.integer("M")), width_(a.integer("D")), epsilon_(a.number("epsilon")) {}

void AddNorm::run(const Context& context) const {
  const float* x = context.input<float>(0);
  const float* added = context.input<float>(1);
  const float* weight = context.input<float>(2);
  float* total = context.output<float>(0, {rows_, width_});
  float* out = context.output<float>(1, {rows_, width_});
  each_row(context, rows_, width_, [&](int64_t m) {
    const int64_t at = m * width_;
    for (int64_t i = 0; i < width_; i += vec::kLanes) {
      const int64_t live = width_ - i;
      vec::store(total + at + i, vec::load(x + at + i, live) + vec::load(added + at + i, live), live);
    }
    normalise(total + at, weight, out + at, width_, epsilon_);
  });
}

}  // namespace qwen_mtp
