// Attention of a few queries over one part of their context, and how parts become one.
//
// A part is `kPart` positions of a sequence, cut at fixed positions. What a query gets of a part
// is summed in the order of the positions up to its own, whatever other queries are beside it; so
// are the parts. Its bits therefore depend on nothing but its own sequence.
#pragma once

#include <algorithm>
#include <limits>

#include "half.h"

namespace qwen_mtp {

constexpr int64_t kPart = 256;
constexpr int64_t kTile = 4;  // queries, and keys, whose products are made together

inline int64_t rounded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Queries that share keys. Rows of `wide` floats, zeros behind `dim`, as many as whole tiles.
struct Queries {
  int64_t count, dim, wide;
  const float* rows;    // scaled
  const int64_t* sees;  // positions of the part that are a query's to read, by query
};

// What queries got of a part, or of all before: not yet divided by `sum`.
struct Mixture {
  float* rows;  // [count, wide]
  float* most;  // the largest score; -inf for none
  float* sum;   // of e^(score - most)
};

// Keys or values of a part, by position.
template <class T>
using Places = const T* const*;

// Scratch of one part.
template <class T>
struct Workspace {
  float* scores;      // [count in whole tiles, kPart]
  float* wide_rows;   // [kRun, wide]: rows as floats
};

constexpr int64_t kRun = 16;  // values that are met by all queries before the next ones are read

template <class T>
void attend(const Queries& queries, Places<T> keys, Places<T> values, int64_t live, const Workspace<T>& work,
            const Mixture& out);

// Add a part to what came before it, for the query at `index` of both.
void merge(const Mixture& all, int64_t index, const Mixture& part, int64_t from, int64_t wide);

}  // namespace qwen_mtp
