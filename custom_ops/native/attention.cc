#include "attention.h"

#include <cmath>

#include "attention_part.h"

namespace qwen_mtp {
namespace {

using vec::kLanes;

constexpr int64_t kRows = 16;  // rows of a slot that share one pass over its context
enum Scratch { kPartials, kStates, kQueryRows, kScores, kWideRows, kPlaces, kSmall };

// One call: where everything lies, and what may be read of it.
template <class T>
struct Call {
  AttentionSizes s;
  const float* query;
  const T *keys, *values;
  const int32_t *table, *start, *count;
  const float *gate, *extra_keys, *extra_values;
  int64_t width;
  float* out;

  int64_t wide() const { return rounded(s.dim, kLanes); }
  // Positions of slot b that have been written and that the table covers.
  int64_t end(int64_t b) const { return std::min<int64_t>(start[b] + count[b], width * s.block); }
  int64_t rows(int64_t b) const { return std::min<int64_t>(std::max(count[b], 0), s.rows); }
  // Positions that row r sees.
  int64_t reach(int64_t b, int64_t r) const { return std::min<int64_t>(start[b] + r + 1, end(b)); }
  int64_t stored_parts(int64_t b) const { return rounded(end(b), kPart) / kPart; }
  int64_t parts(int64_t b) const { return stored_parts(b) + (s.extra > 0 ? 1 : 0); }

  // Rows of the pools at `live` positions of head h from `first` on; the zero slot where no block is.
  void place(int64_t b, int64_t h, int64_t first, int64_t live, const T** at_keys, const T** at_values) const {
    for (int64_t t = 0; t < live; ++t) {
      const int64_t position = first + t, block = table[b * width + position / s.block];
      const int64_t slot = block > 0 ? block * s.block + position % s.block : 0;
      at_keys[t] = keys + (h * s.slots + slot) * s.dim;
      at_values[t] = values + (h * s.slots + slot) * s.dim;
    }
  }
};

// Rows `first .. first + rows` of slot b that read head h, and room for what they get.
template <class T>
class Group {
 public:
  Group(const Call<T>& call, int64_t b, int64_t h, int64_t first, int64_t rows)
      : call_(call), b_(b), h_(h), first_(first), count_(rows * call.s.group()), wide_(call.wide()) {
    const AttentionSizes& s = call.s;
    const int64_t group = s.group(), padded = rounded(count_, kTile);
    float* to = scratch<float>(kQueryRows, padded * wide_);
    std::fill_n(to, padded * wide_, 0.0f);
    const vec::Floats scale = vec::fill(1.0f / std::sqrt(static_cast<float>(s.dim)));
    for (int64_t i = 0; i < count_; ++i) {
      const float* from = call.query + (((b * s.rows) + first + i / group) * s.heads + h * group + i % group) * s.dim;
      for (int64_t d = 0; d < s.dim; d += kLanes) {
        vec::store(to + i * wide_ + d, vec::load(from + d, s.dim - d) * scale);
      }
    }
    queries_ = to;
    scores_ = scratch<float>(kScores, padded * kPart);
    floats_ = scratch<float>(kWideRows, kRun * wide_);
    sees_ = scratch<int64_t>(kSmall, count_);
  }

  // Attend to part p, the extra rows where p is beyond the stored ones.
  void part(int64_t p, const Mixture& out) const {
    if (p < call_.stored_parts(b_)) stored(p * kPart, out);
    else extra(out);
  }

  // Whether the query at i takes part p: what lies behind a row's own position is not even merged.
  bool takes(int64_t i, int64_t p) const {
    return p >= call_.stored_parts(b_) || call_.reach(b_, first_ + i / call_.s.group()) > p * kPart;
  }

  // Divide, gate, and put where the rows belong.
  void leave(const Mixture& all) const {
    const AttentionSizes& s = call_.s;
    const int64_t group = s.group();
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t at = ((b_ * s.rows + first_ + i / group) * s.heads + h_ * group + i % group) * s.dim;
      const vec::Floats share = vec::fill(1.0f / all.sum[i]);
      for (int64_t d = 0; d < s.dim; d += kLanes) {
        vec::Floats v = vec::load(all.rows + i * wide_ + d) * share;
        if (call_.gate != nullptr) v = v * vec::sigmoid(vec::load(call_.gate + at + d, s.dim - d));
        vec::store(call_.out + at + d, v, s.dim - d);
      }
    }
  }

  int64_t count() const { return count_; }

 private:
  void stored(int64_t first, const Mixture& out) const {
    int64_t live = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t reach = call_.reach(b_, first_ + i / call_.s.group());
      sees_[i] = std::min(kPart, std::max<int64_t>(0, reach - first));
      live = std::max(live, sees_[i]);
    }
    const T** keys = scratch<const T*>(kPlaces, 2 * kPart);
    call_.place(b_, h_, first, live, keys, keys + kPart);
    attend<T>({count_, call_.s.dim, wide_, queries_, sees_}, keys, keys + kPart, live, {scores_, floats_}, out);
  }

  void extra(const Mixture& out) const {
    const AttentionSizes& s = call_.s;
    const float** keys = scratch<const float*>(kPlaces, 2 * kPart);
    for (int64_t j = 0; j < s.extra; ++j) {
      const int64_t at = ((b_ * s.extra + j) * s.kv_heads + h_) * s.dim;
      keys[j] = call_.extra_keys + at;
      keys[kPart + j] = call_.extra_values + at;
    }
    std::fill_n(sees_, count_, s.extra);
    attend<float>({count_, s.dim, wide_, queries_, sees_}, keys, keys + kPart, s.extra, {scores_, floats_}, out);
  }

  const Call<T>& call_;
  int64_t b_, h_, first_, count_, wide_;
  const float* queries_;
  float *scores_, *floats_;
  int64_t* sees_;
};

Mixture mixture(float* memory, int64_t count, int64_t wide) {
  return {memory, memory + count * wide, memory + count * (wide + 1)};
}

int64_t mixture_floats(int64_t count, int64_t wide) { return rounded(count * (wide + 2), kLanes); }

void clear(const Mixture& all, int64_t count, int64_t wide) {
  std::fill_n(all.rows, count * wide, 0.0f);
  std::fill_n(all.most, count, -std::numeric_limits<float>::infinity());
  std::fill_n(all.sum, count, 0.0f);
}

// A task for each head and few rows: part after part.
template <class T>
void by_rows(const Context& context, const Call<T>& call) {
  const AttentionSizes& s = call.s;
  const int64_t pieces = (s.rows + kRows - 1) / kRows, wide = call.wide();
  context.parallel(s.batch * s.kv_heads * pieces, [&](size_t task) {
    const int64_t i = static_cast<int64_t>(task), first = i % pieces * kRows, b = i / pieces / s.kv_heads;
    const int64_t rows = std::min(kRows, call.rows(b) - first);
    if (rows <= 0) return;
    const Group<T> group(call, b, i / pieces % s.kv_heads, first, rows);
    const int64_t count = group.count(), size = mixture_floats(count, wide);
    float* memory = scratch<float>(kStates, 2 * size);
    const Mixture all = mixture(memory, count, wide), part = mixture(memory + size, count, wide);
    clear(all, count, wide);
    for (int64_t p = 0; p < call.parts(b); ++p) {
      if (!group.takes(count - 1, p)) continue;
      group.part(p, part);
      for (int64_t q = 0; q < count; ++q) {
        if (group.takes(q, p)) merge(all, q, part, q, wide);
      }
    }
    group.leave(all);
  });
}

// A task for each head and part, then one for each head that merges them in the same order.
template <class T>
void by_parts(const Context& context, const Call<T>& call, int64_t parts) {
  const AttentionSizes& s = call.s;
  const int64_t wide = call.wide(), size = mixture_floats(s.rows * s.group(), wide);
  float* memory = scratch<float>(kPartials, s.batch * s.kv_heads * parts * size);
  context.parallel(s.batch * s.kv_heads * parts, [&](size_t task) {
    const int64_t i = static_cast<int64_t>(task), p = i % parts, b = i / parts / s.kv_heads;
    if (call.rows(b) == 0 || p >= call.parts(b)) return;
    const Group<T> group(call, b, i / parts % s.kv_heads, 0, call.rows(b));
    group.part(p, mixture(memory + i * size, group.count(), wide));
  });
  context.parallel(s.batch * s.kv_heads, [&](size_t task) {
    const int64_t i = static_cast<int64_t>(task), b = i / s.kv_heads;
    if (call.rows(b) == 0) return;
    const Group<T> group(call, b, i % s.kv_heads, 0, call.rows(b));
    const int64_t count = group.count();
    const Mixture all = mixture(scratch<float>(kStates, size), count, wide);
    clear(all, count, wide);
    for (int64_t p = 0; p < call.parts(b); ++p) {
      const Mixture part = mixture(memory + (i * parts + p) * size, count, wide);
      for (int64_t q = 0; q < count; ++q) {
        if (group.takes(q, p)) merge(all, q, part, q, wide);
      }
    }
    group.leave(all);
  });
}

}  // namespace

template <class T>
PagedAttention<T>::PagedAttention(const Attributes& a)
    : sizes_{a.integer("B"), a.integer("R"),     a.integer("Nh"),         a.integer("Nkv"),
             a.integer("D"), a.integer("slots"), a.integer("block_size"), a.integer("J")} {
  if (sizes_.extra > kPart) throw Failure("more rows beside the pool than a part of a context has");
}

template <class T>
void PagedAttention<T>::run(const Context& context) const {
  const AttentionSizes& s = sizes_;
  const float* gate = context.input<float>(6);
  float* out = gate == nullptr ? context.output<float>(0, {s.batch, s.rows, s.heads, s.dim})
                               : context.output<float>(0, {s.batch * s.rows, s.heads * s.dim});
  const Call<T> call{s,
                     context.input<float>(0),
                     context.input<T>(1),
                     context.input<T>(2),
                     context.input<int32_t>(3),
                     context.input<int32_t>(4),
                     context.input<int32_t>(5),
                     gate,
                     context.input<float>(7),
                     context.input<float>(8),
                     context.dimension(3, 1),
                     out};
  int64_t parts = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t done = call.rows(b) * s.heads * s.dim, all = s.rows * s.heads * s.dim;
    std::fill_n(out + b * all + done, all - done, 0.0f);
    if (done > 0) parts = std::max(parts, call.parts(b));
  }
  if (parts == 0) return;
  if (s.rows > kRows || parts - (s.extra > 0 ? 1 : 0) <= 1) by_rows(context, call);
  else by_parts(context, call, parts);
}

template class PagedAttention<float>;
template class PagedAttention<Half>;

}  // namespace qwen_mtp
