// Rows of the gated delta rule through a block of columns of one head's state.
//
// For a row with key k, query q, value v, decay a and rate b, a column S of the state goes through
//   d = b (v - a S.k);   o = a S.q + (k.q) d;   S <- a S + d k
// so that one pass over the state moves it past a row and reads what the next row asks of it.
// Every column is summed in the order of its keys, whatever is computed beside it.
#pragma once

#include "math.h"

namespace qwen_mtp {

struct DeltaRow {
  const float* key;
  const float* query;  // scaled; null where only the state is wanted
  const float* value;  // of the head, first column
  float* out;
  float decay, rate;
  float agreement;  // key . query
};

// One head's state: [keys, columns], which may be changed in place.
struct DeltaState {
  const float* from;
  float* to;
  int64_t keys, columns;
};

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockVectors = 4;  // 32 registers hold a block's sums
#else
constexpr int kBlockVectors = 2;
#endif

template <int N>
class DeltaBlock {
 public:
  // `work` has room for keys * N vectors.
  DeltaBlock(const DeltaState& state, int64_t column, float* work)
      : from_(state.from + column), to_(state.to + column), work_(work), keys_(state.keys),
        stride_(state.columns), column_(column) {}

  // Leave in `to` the state after the first `kept` of `count` rows. Rows after those start there.
  void run(const DeltaRow* rows, int64_t count, int64_t kept) {
    const bool apart = from_ != to_;
    if (count == 0) {
      if (apart) pass<false, false, false, true>(nullptr, nullptr);
      return;
    }
    begin(rows, kept == 0 && apart);
    for (int64_t t = 0; t < count; ++t) {
      answer(rows[t]);
      if (t + 1 < count) {
        step(rows + t, t + 1 == kept);
      } else if (count == kept) {
        pass<true, false, false, true>(rows + t, nullptr);
      }
    }
  }

 private:
  using Floats = vec::Floats;

  void begin(const DeltaRow* first, bool keep) {
    if (first->query == nullptr) return pass<false, true, false, false>(nullptr, first);
    if (keep) return pass<false, true, true, true>(nullptr, first);
    pass<false, true, true, false>(nullptr, first);
  }

  void step(const DeltaRow* done, bool keep) {
    if (done[1].query == nullptr) return pass<true, true, false, false>(done, done + 1);
    if (keep) return pass<true, true, true, true>(done, done + 1);
    pass<true, true, true, false>(done, done + 1);
  }

  // What a row changes, from what was read for it.
  void answer(const DeltaRow& row) {
    for (int n = 0; n < N; ++n) {
      const int64_t at = column_ + n * vec::kLanes;
      const Floats value = vec::load(row.value + at, stride_ - at);
      change_[n] = row.rate * (value - row.decay * read_[n]);
      if (row.query == nullptr) continue;
      const Floats out = vec::fma(vec::fill(row.agreement), change_[n], row.decay * asked_[n]);
      vec::store(row.out + at, out, stride_ - at);
    }
  }

  // Load the state (or go past `done`), read for `next` with its key and query, keep the result.
  template <bool kDone, bool kNext, bool kQuery, bool kKeep>
  void pass(const DeltaRow* done, const DeltaRow* next) {
    constexpr int64_t kLanes = vec::kLanes;
    const Floats decay = vec::fill(kDone ? done->decay : 0.0f);
    Floats read[N], asked[N], change[N];
    for (int n = 0; n < N; ++n) {
      read[n] = asked[n] = vec::fill(0.0f);
      change[n] = change_[n];
    }
    float* work = work_;
    for (int64_t i = 0; i < keys_; ++i, work += N * kLanes) {
      Floats state[N];
      for (int n = 0; n < N; ++n) {
        const int64_t at = i * stride_ + n * kLanes, live = stride_ - column_ - n * kLanes;
        if constexpr (kDone) {
          const Floats gone = decay * vec::load(work + n * kLanes);
          state[n] = vec::fma(vec::fill(done->key[i]), change[n], gone);
        } else {
          state[n] = vec::load(from_ + at, live);
        }
        if constexpr (kKeep) vec::store(to_ + at, state[n], live);
        if constexpr (kNext) vec::store(work + n * kLanes, state[n]);
      }
      for (int n = 0; n < N; ++n) {
        if constexpr (kNext) read[n] = vec::fma(vec::fill(next->key[i]), state[n], read[n]);
        if constexpr (kQuery) asked[n] = vec::fma(vec::fill(next->query[i]), state[n], asked[n]);
      }
    }
    for (int n = 0; n < N; ++n) {
      read_[n] = read[n];
      asked_[n] = asked[n];
    }
  }

  const float* from_;
  float* to_;
  float* work_;
  int64_t keys_, stride_, column_;
  Floats read_[N], asked_[N], change_[N];
};

// All columns of one head, block by block; `work` has room for keys * kBlockVectors vectors.
inline void run_head(const DeltaState& state, const DeltaRow* rows, int64_t count, int64_t kept,
                     float* work) {
  for (int64_t column = 0; column < state.columns; column += kBlockVectors * vec::kLanes) {
    const int64_t vectors = (state.columns - column + vec::kLanes - 1) / vec::kLanes;
    switch (vectors < kBlockVectors ? vectors : kBlockVectors) {
      case 1: DeltaBlock<1>(state, column, work).run(rows, count, kept); break;
      case 2: DeltaBlock<2>(state, column, work).run(rows, count, kept); break;
#if defined(__AVX512F__) || defined(__aarch64__)
      case 3: DeltaBlock<3>(state, column, work).run(rows, count, kept); break;
      default: DeltaBlock<4>(state, column, work).run(rows, count, kept);
#endif
    }
  }
}

}  // namespace qwen_mtp
