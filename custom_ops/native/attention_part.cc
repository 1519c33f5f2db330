#include "attention_part.h"

namespace qwen_mtp {
namespace {

using vec::Floats;
using vec::kLanes;

constexpr int64_t kAhead = 16;  // rows that are on their way from memory while others are used
constexpr float kNone = -std::numeric_limits<float>::infinity();

// A stored row as floats with zeros behind it: where it lies if it is that already.
const float* as_floats(const float* row, int64_t dim, int64_t wide, float* to) {
  if (dim == wide) return row;
  for (int64_t d = 0; d < wide; d += kLanes) vec::store(to + d, vec::load(row + d, std::max<int64_t>(0, dim - d)));
  return to;
}

const float* as_floats(const Half* row, int64_t dim, int64_t wide, float* to) {
  for (int64_t d = 0; d < wide; d += kLanes) vec::store(to + d, vec::load(row + d, std::max<int64_t>(0, dim - d)));
  return to;
}

#if defined(__AVX512F__)
inline __m512 across(__m512 a, __m512 b) {  // sums of pairs of quarters: a's two, then b's two
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Each quarter of the result sums the same quarter of the four arguments, one by one.
inline __m512 quarters(const __m512* a) {
  const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
  const __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
  const __m512d p = _mm512_castps_pd(x), q = _mm512_castps_pd(y);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
}

inline void leave(const __m512 (&sums)[kTile][kTile], float* out) {
  const __m512 low = across(quarters(sums[0]), quarters(sums[1]));
  const __m512 high = across(quarters(sums[2]), quarters(sums[3]));
  const __m512 all = across(low, high);
  _mm_storeu_ps(out, _mm512_castps512_ps128(all));
  _mm_storeu_ps(out + kPart, _mm512_extractf32x4_ps(all, 1));
  _mm_storeu_ps(out + 2 * kPart, _mm512_extractf32x4_ps(all, 2));
  _mm_storeu_ps(out + 3 * kPart, _mm512_extractf32x4_ps(all, 3));
}
#else
inline void leave(const Floats (&sums)[kTile][kTile], float* out) {
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kTile; ++j) out[i * kPart + j] = vec::sum(sums[i][j]);
  }
}
#endif

// Scores of a tile of queries with a tile of keys, `kPart` apart by query.
void score(const float* queries, const float* const (&keys)[kTile], int64_t wide, float* out) {
  Floats sums[kTile][kTile];
  for (auto& row : sums) {
    for (Floats& s : row) s = vec::fill(0.0f);
  }
  for (int64_t d = 0; d < wide; d += kLanes) {
    Floats k[kTile];
    for (int j = 0; j < kTile; ++j) k[j] = vec::load(keys[j] + d);
    for (int i = 0; i < kTile; ++i) {
      const Floats q = vec::load(queries + i * wide + d);
      for (int j = 0; j < kTile; ++j) sums[i][j] = vec::fma(q, k[j], sums[i][j]);
    }
  }
  leave(sums, out);
}

// Scores in place to e^(score - most) for the `live` positions; their largest and their sum.
void soften(float* scores, int64_t live, float* most, float* sum) {
  for (int64_t t = live; t < rounded(live, kLanes); ++t) scores[t] = kNone;
  Floats largest = vec::fill(kNone);
  for (int64_t t = 0; t < live; t += kLanes) largest = vec::larger(vec::load(scores + t), largest);
  *most = largest[0];
  for (int i = 1; i < kLanes; ++i) *most = std::max(*most, static_cast<float>(largest[i]));
  const Floats base = vec::fill(*most == kNone ? 0.0f : *most);
  Floats total = vec::fill(0.0f);
  for (int64_t t = 0; t < live; t += kLanes) {
    const Floats x = vec::load(scores + t) - base;
    // Nothing below the normal numbers: multiplying by those takes a machine a hundred times longer.
    const Floats e = x < -87.0f ? vec::fill(0.0f) : vec::exp(x);
    vec::store(scores + t, e);
    total = total + e;
  }
  *sum = vec::sum(total);
}

// Add weights times values to `kQ` queries, `kWide` vectors of them from dimension d on; weights
// are `kPart` apart.
template <int kQ, int kWide>
void mix(const float* weights, const float* const* values, int64_t count, int64_t d, int64_t wide, float* out) {
  Floats sums[kQ][kWide];
  for (int i = 0; i < kQ; ++i) {
    for (int j = 0; j < kWide; ++j) sums[i][j] = vec::load(out + i * wide + d + j * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    Floats v[kWide];
    for (int j = 0; j < kWide; ++j) v[j] = vec::load(values[t] + d + j * kLanes);
    for (int i = 0; i < kQ; ++i) {
      const Floats w = vec::fill(weights[i * kPart + t]);
      for (int j = 0; j < kWide; ++j) sums[i][j] = vec::fma(w, v[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kQ; ++i) {
    for (int j = 0; j < kWide; ++j) vec::store(out + i * wide + d + j * kLanes, sums[i][j]);
  }
}

template <int kQ>
void mix_all(const float* weights, const float* const* values, int64_t count, int64_t wide, float* out) {
  if (count <= 0) return;
  int64_t d = 0;
  for (; d + 4 * kLanes <= wide; d += 4 * kLanes) mix<kQ, 4>(weights, values, count, d, wide, out);
  for (; d < wide; d += kLanes) mix<kQ, 1>(weights, values, count, d, wide, out);
}

// A run of values from position `first` on, for a tile of queries of which `real` are there.
void mix_tile(const float* weights, const int64_t* sees, int64_t real, int64_t first, int64_t run,
              const float* const* values, int64_t wide, float* out) {
  int64_t common = run;
  for (int64_t i = 0; i < real; ++i) common = std::min(common, std::max<int64_t>(0, sees[i] - first));
  int64_t i = 0;
  if (real == kTile) mix_all<kTile>(weights + first, values, common, wide, out);
  else common = 0;
  // The rest of a row's own positions: the others of the tile may not even multiply by them.
  for (; i < real; ++i) {
    const int64_t own = std::min(run, sees[i] - first) - common;
    mix_all<1>(weights + i * kPart + first + common, values + common, own, wide, out + i * wide);
  }
}

// Ask for the row at `t` of keys and then values, counted on from one to the other. Always inline:
// the compiler takes a function that only asks for one without effect.
template <class T>
__attribute__((always_inline)) inline void fetch(Places<T> keys, Places<T> values, int64_t live, int64_t t, int64_t dim) {
  const T* row = t < live ? keys[t] : t < 2 * live ? values[t - live] : nullptr;
  if (row == nullptr) return;
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < dim * sizeof(T); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// The share of tile i in asking for `count` rows from t on.
template <class T>
__attribute__((always_inline)) inline void fetch_share(const Queries& q, Places<T> keys, Places<T> values, int64_t live, int64_t t, int64_t count, int64_t i) {
  const int64_t tiles = (q.count + kTile - 1) / kTile, mine = i / kTile;
  for (int64_t j = count * mine / tiles; j < count * (mine + 1) / tiles; ++j) {
    fetch<T>(keys, values, live, t + j, q.dim);
  }
}

}  // namespace

template <class T>
void attend(const Queries& q, Places<T> keys, Places<T> values, int64_t live, const Workspace<T>& work,
            const Mixture& out) {
  for (int64_t t = 0; t < live; t += kTile) {
    const float* tile[kTile];
    for (int64_t j = 0; j < kTile; ++j) {
      tile[j] = as_floats(keys[std::min(t + j, live - 1)], q.dim, q.wide, work.wide_rows + j * q.wide);
    }
    for (int64_t i = 0; i < q.count; i += kTile) {
      fetch_share<T>(q, keys, values, live, t + kAhead, kTile, i);
      score(q.rows + i * q.wide, tile, q.wide, work.scores + i * kPart + t);
    }
  }
  for (int64_t i = 0; i < q.count; ++i) soften(work.scores + i * kPart, q.sees[i], out.most + i, out.sum + i);
  std::fill_n(out.rows, q.count * q.wide, 0.0f);
  for (int64_t t = 0; t < live; t += kRun) {
    const int64_t run = std::min(kRun, live - t);
    const float* rows[kRun];
    for (int64_t j = 0; j < run; ++j) rows[j] = as_floats(values[t + j], q.dim, q.wide, work.wide_rows + j * q.wide);
    for (int64_t i = 0; i < q.count; i += kTile) {
      fetch_share<T>(q, keys, values, live, live + t + kAhead, kRun, i);
      mix_tile(work.scores + i * kPart, q.sees + i, std::min(kTile, q.count - i), t, run, rows, q.wide,
               out.rows + i * q.wide);
    }
  }
}

template void attend<float>(const Queries&, Places<float>, Places<float>, int64_t, const Workspace<float>&,
                            const Mixture&);
template void attend<Half>(const Queries&, Places<Half>, Places<Half>, int64_t, const Workspace<Half>&,
                           const Mixture&);

void merge(const Mixture& all, int64_t index, const Mixture& part, int64_t from, int64_t wide) {
  const float most = std::max(all.most[index], part.most[from]);
  const float base = most == kNone ? 0.0f : most;
  const float before = vec::exp(vec::fill(all.most[index] - base))[0];
  const float now = vec::exp(vec::fill(part.most[from] - base))[0];
  all.most[index] = most;
  all.sum[index] = all.sum[index] * before + part.sum[from] * now;
  float* to = all.rows + index * wide;
  const float* rows = part.rows + from * wide;
  for (int64_t d = 0; d < wide; d += kLanes) {
    const Floats old = vec::load(to + d) * vec::fill(before);
    vec::store(to + d, vec::fma(vec::load(rows + d), vec::fill(now), old));
  }
}

}  // namespace qwen_mtp
