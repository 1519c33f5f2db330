#include "delta.h"

#include <algorithm>
#include <cmath>

#include "delta_state.h"

namespace qwen_mtp {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the norms of queries and keys
constexpr int kArena = 2;          // scratch slot
constexpr int64_t kAhead = 4;      // rows whose memory is called for before their turn

// Pieces of one allocation, each aligned for any vector.
class Arena {
 public:
  static int64_t padded(int64_t count) { return (count + 15) & ~int64_t{15}; }
  explicit Arena(int64_t count) : next_(scratch<float>(kArena, count)) {}
  float* take(int64_t count) {
    float* piece = next_;
    next_ += padded(count);
    return piece;
  }

 private:
  float* next_;
};

// Rows of one kind, for the heads of one task that have them: one key head, its value heads.
struct HeadRows {
  float* data;
  int64_t stride, dim;
  float* at(int64_t row, int64_t head = 0) const { return data + row * stride + head * dim; }
};

struct Parameters {
  const float *taps, *decay, *dt_bias, *norm;
};

// The rows of one slot as the projections leave them, and where their results go.
struct Rows {
  int64_t count;
  const float* qkvz;  // [count, channels + value_size]
  const float* ba;    // [count, 2 * heads]
  const float* window;
  HeadRows key, value;
  float *gate, *rate;  // [count, heads]: log decay and beta
  float* out;          // [count, value_size]
};

// The rows of a slot that are to be committed first.
struct Pending {
  int64_t count;
  HeadRows key, value;
  const float *gate, *rate;
};

// One key head of one slot, with the value heads that read it; nothing else touches its channels.
class Head {
 public:
  Head(const DeltaSizes& sizes, const Parameters& parameters, const Rows& rows, int64_t head)
      : s_(sizes), p_(parameters), rows_(rows), head_(head) {}

  static int64_t room(const DeltaSizes& s, int64_t rows, int64_t pending) {
    const int64_t block = s.key_dim * kBlockVectors * vec::kLanes;
    return Arena::padded(rows * s.key_dim) + Arena::padded(rows * s.value_dim) +
           4 * Arena::padded(rows) + Arena::padded(block) + (rows + s.taps) * 2 +
           (rows + pending) * static_cast<int64_t>(sizeof(DeltaRow) / sizeof(float)) + 64;
  }

  void run(const Pending& pending, const float* state, float* state_out, bool keep_rows) {
    const int64_t total = pending.count + rows_.count;
    Arena arena(room(s_, rows_.count, pending.count));
    query_ = HeadRows{arena.take(rows_.count * s_.key_dim), s_.key_dim, 0};
    outputs_ = arena.take(rows_.count * s_.value_dim);
    for (float** part : {&agreement_, &decay_, &rate_, &bias_}) *part = arena.take(rows_.count);
    float* work = arena.take(s_.key_dim * kBlockVectors * vec::kLanes);
    lines_ = reinterpret_cast<const float**>(arena.take((rows_.count + s_.taps) * 2));
    auto* steps = reinterpret_cast<DeltaRow*>(
        arena.take(total * static_cast<int64_t>(sizeof(DeltaRow) / sizeof(float))));
    convolve_all();
    normalise();
    const int64_t size = s_.key_dim * s_.value_dim;
    for (int64_t h = head_ * s_.ratio(); h < (head_ + 1) * s_.ratio(); ++h) {
      gates(h);
      list(pending, h, steps);
      const DeltaState block{state + h * size, state_out + h * size, s_.key_dim, s_.value_dim};
      run_head(block, steps, total, keep_rows ? total : pending.count, h + 1 < s_.heads, work);
      for (int64_t t = 0; t < rows_.count; ++t) leave(t, h);
    }
  }

 private:
  void convolve_all() {
    const int64_t width = s_.channels() + s_.value_size();
    for (int64_t i = 0; i < s_.taps - 1; ++i) lines_[i] = rows_.window + i * s_.channels();
    for (int64_t t = 0; t < rows_.count; ++t) lines_[s_.taps - 1 + t] = rows_.qkvz + t * width;
    const int64_t values = s_.ratio() * s_.value_dim;
    convolve(head_ * s_.key_dim, s_.key_dim, query_);
    convolve(s_.key_size() + head_ * s_.key_dim, s_.key_dim, rows_.key);
    convolve(2 * s_.key_size() + head_ * values, values, rows_.value);
  }

  // Channels [first, first + count) of every row, through SiLU.
  void convolve(int64_t first, int64_t count, const HeadRows& to) {
    if (s_.taps == 4) return convolve<4>(first, count, to);
    convolve<0>(first, count, to);
  }

  // kTaps of 0: known at run time only.
  template <int64_t kTaps>
  void convolve(int64_t first, int64_t count, const HeadRows& to) {
    const int64_t taps = kTaps > 0 ? kTaps : s_.taps, channels = s_.channels();
    const float* weight = p_.taps + first;
    for (int64_t t = 0; t < rows_.count; ++t) {
      const float* const* lines = lines_ + t;
      const float* later = lines_[std::min(t + taps - 1 + kAhead, rows_.count + taps - 2)] + first;
      float* out = to.at(t);
      for (int64_t c = 0; c < count; c += vec::kLanes) {
        const int64_t live = count - c;
        __builtin_prefetch(later + c);
        vec::Floats total = vec::fill(0.0f);
        for (int64_t j = 0; j < taps; ++j) {
          const vec::Floats tap = vec::load(weight + j * channels + c, live);
          total = vec::fma(vec::load(lines[j] + first + c, live), tap, total);
        }
        vec::store(out + c, vec::silu(total), live);
      }
    }
  }

  // Queries and keys to unit length, queries scaled as well.
  void normalise() {
    const float scale = 1.0f / std::sqrt(static_cast<float>(s_.key_dim));
    for (int64_t t = 0; t < rows_.count; ++t) {
      float *q = query_.at(t), *k = rows_.key.at(t);
      const float query_factor = scale / std::sqrt(product(q, q) + kUnitEps);
      const float key_factor = 1.0f / std::sqrt(product(k, k) + kUnitEps);
      for (int64_t c = 0; c < s_.key_dim; c += vec::kLanes) {
        const int64_t live = s_.key_dim - c;
        vec::store(q + c, vec::load(q + c, live) * query_factor, live);
        vec::store(k + c, vec::load(k + c, live) * key_factor, live);
      }
      agreement_[t] = product(q, k);
    }
  }

  float product(const float* a, const float* b) const {
    vec::Floats total = vec::fill(0.0f);
    for (int64_t c = 0; c < s_.key_dim; c += vec::kLanes) {
      total = vec::fma(vec::load(a + c, s_.key_dim - c), vec::load(b + c, s_.key_dim - c), total);
    }
    return vec::sum(total);
  }

  // Log decay and rate of every row of a value head.
  void gates(int64_t h) {
    const int64_t count = rows_.count;
    for (int64_t t = 0; t < count; ++t) {
      rate_[t] = rows_.ba[t * 2 * s_.heads + h];
      bias_[t] = rows_.ba[(t * 2 + 1) * s_.heads + h] + p_.dt_bias[h];
    }
    for (int64_t t = 0; t < count; t += vec::kLanes) {
      const vec::Floats gate = vec::softplus(vec::load(bias_ + t, count - t)) * p_.decay[h];
      vec::store(bias_ + t, gate, count - t);
      vec::store(decay_ + t, vec::exp(gate), count - t);
      vec::store(rate_ + t, vec::sigmoid(vec::load(rate_ + t, count - t)), count - t);
    }
    if (rows_.gate == nullptr) return;
    for (int64_t t = 0; t < count; ++t) {
      rows_.gate[t * s_.heads + h] = bias_[t];
      rows_.rate[t * s_.heads + h] = rate_[t];
    }
  }

  void list(const Pending& pending, int64_t h, DeltaRow* steps) const {
    const int64_t j = h - head_ * s_.ratio();
    for (int64_t t = 0; t < pending.count; ++t) {
      const float decay = vec::exp(vec::fill(pending.gate[t * s_.heads + h]))[0];
      *steps++ = DeltaRow{pending.key.at(t), nullptr, pending.value.at(t, j), nullptr,
                          decay, pending.rate[t * s_.heads + h], 0.0f};
    }
    for (int64_t t = 0; t < rows_.count; ++t) {
      *steps++ = DeltaRow{rows_.key.at(t), query_.at(t), rows_.value.at(t, j),
                          outputs_ + t * s_.value_dim, decay_[t], rate_[t], agreement_[t]};
    }
  }

  // The gated norm: norm first, then the gate.
  void leave(int64_t t, int64_t h) const {
    const int64_t dim = s_.value_dim, at = s_.channels() + h * dim;
    const float* o = outputs_ + t * dim;
    const float* z = rows_.qkvz + t * (s_.channels() + s_.value_size()) + at;
    const int64_t ahead = std::min(kAhead, rows_.count - 1 - t);
    const float* later = z + ahead * (s_.channels() + s_.value_size());
    float* out = rows_.out + t * s_.value_size() + h * dim;
    vec::Floats total = vec::fill(0.0f);
    for (int64_t c = 0; c < dim; c += vec::kLanes) {
      const vec::Floats x = vec::load(o + c, dim - c);
      total = vec::fma(x, x, total);
    }
    const float factor = 1.0f / std::sqrt(vec::sum(total) / static_cast<float>(dim) + s_.eps);
    for (int64_t c = 0; c < dim; c += vec::kLanes) {
      __builtin_prefetch(later + c);
      const vec::Floats gate = vec::load(z + c, dim - c);
      const vec::Floats x = vec::load(o + c, dim - c) * factor * vec::load(p_.norm + c, dim - c);
      vec::store(out + c, x * (s_.silu ? vec::silu(gate) : vec::sigmoid(gate)), dim - c);
    }
  }

  const DeltaSizes& s_;
  const Parameters& p_;
  const Rows& rows_;
  const int64_t head_;
  HeadRows query_{nullptr, 0, 0};
  float *outputs_ = nullptr, *agreement_ = nullptr, *decay_ = nullptr, *rate_ = nullptr;
  float* bias_ = nullptr;
  const float** lines_ = nullptr;
};

// Call `each(first, count)` for the three runs of channels that belong to a key head.
template <class Each>
void channels_of(const DeltaSizes& s, int64_t head, const Each& each) {
  const int64_t values = s.ratio() * s.value_dim;
  each(head * s.key_dim, s.key_dim);
  each(s.key_size() + head * s.key_dim, s.key_dim);
  each(2 * s.key_size() + head * values, values);
}

// Move a head's channels of a window past `count` rows. In place the rows are taken in order.
void commit_window(const DeltaSizes& s, int64_t head, const float* window, const float* rows,
                   int64_t stride, int64_t count, float* out) {
  const int64_t kept = s.taps - 1;
  if (count == 0 && out == window) return;
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t at = i + count;
    const float* from = at < kept ? window + at * s.channels() : rows + (at - kept) * stride;
    channels_of(s, head, [&](int64_t first, int64_t channels) {
      std::memmove(out + i * s.channels() + first, from + first, channels * sizeof(float));
    });
  }
}

int64_t between(int64_t count, int64_t most) { return std::min(std::max<int64_t>(count, 0), most); }

}  // namespace

DeltaSizes::DeltaSizes(const Attributes& a)
    : rows(a.integer("R")), key_heads(a.integer("key_heads")), heads(a.integer("heads")),
      key_dim(a.integer("key_dim")), value_dim(a.integer("value_dim")), taps(a.integer("taps")),
      eps(a.number("eps")), silu(a.integer("silu") != 0) {}

DeltaRound::DeltaRound(const Attributes& a)
    : sizes_(a), batch_(a.integer("B")), kept_(a.integer("P")) {}

void DeltaRound::run(const Context& context) const {
  const DeltaSizes& s = sizes_;
  const int64_t channels = s.channels(), keys = s.key_size(), values = s.value_size();
  const int64_t size = s.heads * s.key_dim * s.value_dim, window_size = (s.taps - 1) * channels;
  const float *qkvz = context.input<float>(0), *ba = context.input<float>(1);
  const Parameters parameters{context.input<float>(2), context.input<float>(3),
                              context.input<float>(4), context.input<float>(5)};
  const float *window = context.input<float>(6), *state = context.input<float>(7);
  const float* stash[5];
  for (int i = 0; i < 5; ++i) stash[i] = context.input<float>(8 + i);
  const int32_t* accepted = context.input<int32_t>(13);
  float* out = context.output<float>(0, {batch_ * s.rows, values});
  float* window_out = context.output<float>(1, {batch_, s.taps - 1, channels});
  float* state_out = context.output<float>(2, {batch_, s.heads, s.key_dim, s.value_dim});
  float* kept[5] = {
      context.output<float>(3, {batch_, kept_, channels}),
      context.output<float>(4, {batch_, kept_, s.key_heads, s.key_dim}),
      context.output<float>(5, {batch_, kept_, s.heads, s.value_dim}),
      context.output<float>(6, {batch_, kept_, s.heads}),
      context.output<float>(7, {batch_, kept_, s.heads}),
  };
  context.parallel(batch_ * s.key_heads, [&](size_t task) {
    const int64_t b = static_cast<int64_t>(task) / s.key_heads;
    const int64_t head = static_cast<int64_t>(task) % s.key_heads;
    const int64_t first = b * kept_, count = between(accepted[b], kept_);
    const int64_t key_at = first * keys + head * s.key_dim;
    const int64_t value_at = first * values + head * s.ratio() * s.value_dim;
    auto part = [](const float* data, int64_t at) { return const_cast<float*>(data) + at; };
    const Pending pending{count,
                          {part(stash[1], key_at), keys, s.key_dim},
                          {part(stash[2], value_at), values, s.value_dim},
                          stash[3] + first * s.heads,
                          stash[4] + first * s.heads};
    const int64_t width = channels + values;
    const Rows rows{s.rows,
                    qkvz + b * s.rows * width,
                    ba + b * s.rows * 2 * s.heads,
                    window_out + b * window_size,
                    {kept[1] + key_at, keys, s.key_dim},
                    {kept[2] + value_at, values, s.value_dim},
                    kept[3] + first * s.heads,
                    kept[4] + first * s.heads,
                    out + b * s.rows * values};
    commit_window(s, head, window + b * window_size, stash[0] + first * channels, channels, count,
                  window_out + b * window_size);
    channels_of(s, head, [&](int64_t at, int64_t n) {
      for (int64_t t = 0; t < s.rows; ++t) {
        float* to = kept[0] + (first + t) * channels + at;
        std::memcpy(to, rows.qkvz + t * width + at, n * sizeof(float));
      }
    });
    Head(s, parameters, rows, head).run(pending, state + b * size, state_out + b * size, false);
  });
}

DeltaChunk::DeltaChunk(const Attributes& a) : sizes_(a) {}

void DeltaChunk::run(const Context& context) const {
  const DeltaSizes& s = sizes_;
  const int64_t channels = s.channels(), values = s.ratio() * s.value_dim;
  const float *qkvz = context.input<float>(0), *ba = context.input<float>(1);
  const Parameters parameters{context.input<float>(2), context.input<float>(3),
                              context.input<float>(4), context.input<float>(5)};
  const float *window = context.input<float>(6), *state = context.input<float>(7);
  const int64_t count = between(context.input<int32_t>(8)[0], s.rows);
  float* out = context.output<float>(0, {s.rows, s.value_size()});
  float* window_out = context.output<float>(1, {1, s.taps - 1, channels});
  float* state_out = context.output<float>(2, {1, s.heads, s.key_dim, s.value_dim});
  std::fill(out + count * s.value_size(), out + s.rows * s.value_size(), 0.0f);
  context.parallel(s.key_heads, [&](size_t task) {
    const auto head = static_cast<int64_t>(task);
    float* made = scratch<float>(kArena + 1, count * (s.key_dim + values));
    const Rows rows{count,
                    qkvz,
                    ba,
                    window,
                    {made, s.key_dim, s.key_dim},
                    {made + count * s.key_dim, values, s.value_dim},
                    nullptr,
                    nullptr,
                    out};
    Head(s, parameters, rows, head).run(Pending{}, state, state_out, true);
    commit_window(s, head, window, qkvz, channels + s.value_size(), count, window_out);
  });
}

}  // namespace qwen_mtp
