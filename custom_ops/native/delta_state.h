// Rows of the gated delta rule through a block of columns of one head's state.
//
// For a row with key k, query q, value v, decay a and rate b, a column S of the state goes through
//   d = b (v - a S.k);   o = a S.q + (k.q) d;   S <- a S + d k
// so that one pass over the state moves it past a row and reads what the next row asks of it.
// Every column is summed in the order of its keys, whatever is computed beside it.
#pragma once

#include <algorithm>

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
  // `work` has room for keys * N vectors; `ahead` is where the next block starts, or null.
  DeltaBlock(const DeltaState& state, int64_t column, float* work, const float* ahead)
      : from_(state.from + column), to_(state.to + column), work_(work), ahead_(ahead),
        keys_(state.keys), stride_(state.columns), column_(column) {}

  // Leave in `to` the state after the first `kept` of `count` rows. Rows after those start there.
  void run(const DeltaRow* rows, int64_t count, int64_t kept) {
    const bool apart = from_ != to_;
    if (count == 0) {
      if (apart) pass<false, false, false, true>(nullptr, nullptr);
      return;
    }
    begin(rows, kept == 0 && apart);
    const int64_t share = count > N ? 1 : count > 1 ? (N + count - 2) / (count - 1) : N;
    for (int64_t t = 0; t < count; ++t) {
      fetch_ = ahead_ == nullptr ? N : std::min<int64_t>(t * share, N);
      fetched_ = std::min<int64_t>(fetch_ + share, N);
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
    const float* past = kDone ? done->key : nullptr;
    const float* key = kNext ? next->key : nullptr;
    const float* query = kQuery ? next->query : nullptr;
    Floats read[N], asked[N], change[N];
    for (int n = 0; n < N; ++n) {
      read[n] = asked[n] = vec::fill(0.0f);
      change[n] = change_[n];
    }
    float* work = work_;
    const int64_t keys = keys_, stride = stride_, live = stride_ - column_;
    const int64_t fetch = fetch_, fetched = fetched_;
    const float* ahead = ahead_;
    for (int64_t i = 0; i < keys; ++i, work += N * kLanes) {
      Floats state[N];
      if constexpr (kDone) {
        const Floats k = vec::fill(past[i]);
        for (int n = 0; n < N; ++n) {
          state[n] = vec::fma(k, change[n], decay * vec::load(work + n * kLanes));
        }
        for (int64_t n = fetch; n < fetched; ++n) {
          __builtin_prefetch(ahead + i * stride + n * kLanes, 0, 2);
        }
      } else {
        for (int n = 0; n < N; ++n) {
          state[n] = vec::load(from_ + i * stride + n * kLanes, live - n * kLanes);
        }
      }
      if constexpr (kKeep) {
        for (int n = 0; n < N; ++n) {
          vec::store(to_ + i * stride + n * kLanes, state[n], live - n * kLanes);
        }
      }
      if constexpr (kNext) {
        const Floats k = vec::fill(key[i]);
        for (int n = 0; n < N; ++n) {
          vec::store(work + n * kLanes, state[n]);
          read[n] = vec::fma(k, state[n], read[n]);
        }
      }
      if constexpr (kQuery) {
        const Floats q = vec::fill(query[i]);
        for (int n = 0; n < N; ++n) asked[n] = vec::fma(q, state[n], asked[n]);
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
  const float* ahead_;
  int64_t fetch_ = N, fetched_ = N;  // vectors of the next block that a pass calls for
  int64_t keys_, stride_, column_;
  Floats read_[N], asked_[N], change_[N];
};

// All columns of one head, block by block; `work` has room for keys * kBlockVectors vectors.
// Where there is a `following` head its state comes right behind.
inline void run_head(const DeltaState& state, const DeltaRow* rows, int64_t count, int64_t kept,
                     bool following, float* work) {
  constexpr int64_t kWide = kBlockVectors * vec::kLanes;
  for (int64_t column = 0; column < state.columns; column += kWide) {
    const int64_t vectors = (state.columns - column + vec::kLanes - 1) / vec::kLanes;
    const float* ahead = following ? state.from + state.keys * state.columns : nullptr;
    if (column + kWide < state.columns) ahead = state.from + column + kWide;
    switch (std::min<int64_t>(vectors, kBlockVectors)) {
      case 1: DeltaBlock<1>(state, column, work, ahead).run(rows, count, kept); break;
      case 2: DeltaBlock<2>(state, column, work, ahead).run(rows, count, kept); break;
#if defined(__AVX512F__) || defined(__aarch64__)
      case 3: DeltaBlock<3>(state, column, work, ahead).run(rows, count, kept); break;
      default: DeltaBlock<4>(state, column, work, ahead).run(rows, count, kept);
#endif
    }
  }
}

}  // namespace qwen_mtp
