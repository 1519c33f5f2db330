#include "rejection_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "math.h"

namespace qwen_mtp {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int64_t kGroup = 4;  // chunks that fill one histogram
constexpr int64_t kRoom = kChunk + 1;  // for the entries of a chunk, and one that is not kept

// What a kernel keeps in `scratch` at a time.
enum Slot : int { kView = 3, kMaxima = 4, kEntries = 5, kPart = 6 };

bool ahead(const Entry& a, const Entry& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

bool any(vec::Ints mask) {
  int32_t all = 0;
  for (int i = 0; i < vec::kLanes; ++i) all |= mask[i];
  return all != 0;
}

// The maxima of every kStep-th entry; false where there is a NaN.
bool find_maxima(const Chunk& chunk, float* maxima) {
  constexpr int kVectors = kStep / vec::kLanes;
  vec::Floats most[kVectors];
  vec::Ints broken{};
  for (vec::Floats& m : most) m = vec::fill(-kInfinity);
  for (int64_t i = 0; i < chunk.width; i += kStep) {
    for (int j = 0; j < kVectors; ++j) {
      const vec::Floats x = vec::load(chunk.x + i + j * vec::kLanes);
      most[j] = vec::larger(x, most[j]);
      broken |= x != x;
    }
  }
  for (int j = 0; j < kVectors; ++j) vec::store(maxima + j * vec::kLanes, most[j]);
  return !any(broken);
}

struct Heat {
  float top, temperature;

  vec::Floats power(vec::Floats logits) const { return (logits - top) / temperature; }

  static vec::Floats bin(vec::Floats power) {
    const vec::Floats place = power * -kBinsPerUnit, last = vec::fill(kBins - 1.0f);
    return place < last ? place : last;
  }

  // The weights of kStep logits and, where asked for, their bins.
  void weigh(const float* logits, float* weights, int32_t* bins = nullptr) const {
    for (int j = 0; j < kStep; j += vec::kLanes) {
      const vec::Floats p = power(vec::load(logits + j));
      vec::store(weights + j, vec::exp(p));
      if (bins == nullptr) continue;
      const vec::Ints places = __builtin_convertvector(bin(p), vec::Ints);
      std::memcpy(bins + j, &places, sizeof places);
    }
  }
};

}  // namespace

Chunk Row::view(int64_t c) const {
  const int64_t first = c * kChunk, real = std::min(kChunk, size_ - first);
  const int64_t width = (real + kStep - 1) / kStep * kStep;
  const auto inside = [&](int32_t id) { return id >= first && id < first + real; };
  if (width == real && std::none_of(out_.begin(), out_.end(), inside)) return {logits_ + first, first, width};
  float* copy = scratch<float>(kView, kChunk);
  std::memcpy(copy, logits_ + first, real * sizeof(float));
  std::fill(copy + real, copy + width, -kInfinity);
  for (int32_t id : out_) {
    if (inside(id)) copy[id - first] -= kInfinity;  // which leaves a NaN where there was one
  }
  return {copy, first, width};
}

bool Row::read() {
  maxima_ = scratch<float>(kMaxima, chunks() * (kStep + 1));
  float* whole = maxima_ + chunks() * kStep;  // whether a chunk is free of NaNs
  each([&](int64_t c, const Chunk& chunk) { whole[c] = find_maxima(chunk, maxima_ + c * kStep); });
  top_ = *std::max_element(maxima_, whole);
  return std::find(whole, whole + chunks(), 0.0f) == whole + chunks() && std::isfinite(top_);
}

int64_t Row::argmax() const {
  if (top_ == -kInfinity) return 0;  // perhaps nothing but NaNs
  const int64_t found = std::find(maxima_, maxima_ + chunks() * kStep, top_) - maxima_;
  const Chunk chunk = view(found / kStep);
  int64_t i = 0;
  while (!any(vec::load(chunk.x + i) == top_)) i += vec::kLanes;
  while (chunk.x[i] != top_) ++i;
  return chunk.first + i;
}

float Row::logit(int64_t id) const {
  const bool out = std::find(out_.begin(), out_.end(), id) != out_.end();
  return out ? logits_[id] - kInfinity : logits_[id];
}

double Row::weight(int64_t id) const {
  const Entry entry{logit(id), 0};
  double weight;
  weigh(&entry, 1, &weight);
  return weight;
}

void Row::weigh(const Entry* entries, int64_t count, double* weights) const {
  const Heat heat{top_, temperature_};
  for (int64_t i = 0; i < count; i += kStep) {
    const int64_t left = std::min(kStep, count - i);
    float x[kStep] = {}, w[kStep];
    for (int64_t j = 0; j < left; ++j) x[j] = entries[i + j].value;
    heat.weigh(x, w);
    for (int64_t j = 0; j < left; ++j) weights[i + j] = w[j];
  }
}

double Row::mass(int64_t c) const {
  const Heat heat{top_, temperature_};
  const Chunk chunk = view(c);
  double sums[kStep] = {}, sum = 0.0;
  for (int64_t i = 0; i < chunk.width; i += kStep) {
    float w[kStep];
    heat.weigh(chunk.x + i, w);
    for (int j = 0; j < kStep; ++j) sums[j] += static_cast<double>(w[j]);
  }
  for (double part : sums) sum += part;
  return sum;
}

void Row::masses(double* sums) const {
  context_.parallel(chunks(), [&](size_t c) { sums[c] = mass(c); });
}

int64_t Row::walk(int64_t c, double sum, double point) const {
  const Heat heat{top_, temperature_};
  const Chunk chunk = view(c);
  int64_t last = 0;
  for (int64_t i = 0; i < chunk.width && sum <= point; i += kStep) {
    float w[kStep];
    heat.weigh(chunk.x + i, w);
    for (int j = 0; j < kStep && sum <= point; ++j) {
      sum += static_cast<double>(w[j]);
      if (w[j] > 0.0f) last = i + j;
    }
  }
  return chunk.first + last;
}

int Row::bin(float logit) const {
  return static_cast<int>(Heat::bin(Heat{top_, temperature_}.power(vec::fill(logit)))[0]);
}

void Row::histogram(double* bins) const {
  const Heat heat{top_, temperature_};
  const int64_t groups = (chunks() + kGroup - 1) / kGroup;
  double* parts = scratch<double>(kPart, groups * kBins);
  context_.parallel(groups, [&](size_t g) {
    double* part = parts + g * kBins;
    std::fill(part, part + kBins, 0.0);
    const int64_t first = static_cast<int64_t>(g) * kGroup;
    for (int64_t c = first; c < std::min(first + kGroup, chunks()); ++c) {
      const Chunk chunk = view(c);
      for (int64_t i = 0; i < chunk.width; i += kStep) {
        float w[kStep];
        int32_t at[kStep];
        heat.weigh(chunk.x + i, w, at);
        for (int j = 0; j < kStep; ++j) part[at[j]] += static_cast<double>(w[j]);
      }
    }
  });
  std::fill(bins, bins + kBins, 0.0);
  for (int64_t i = 0; i < groups * kBins; ++i) bins[i % kBins] += parts[i];
}

// Entries that `keep` marks among those that are at least `least`, in the order of their ids.
template <class Keep>
int64_t Row::gather(const Keep& keep, float least, Entry* all) const {
  std::vector<int64_t> found(chunks(), 0);
  each([&](int64_t c, const Chunk& chunk) {
    const float* maxima = maxima_ + c * kStep;
    if (*std::max_element(maxima, maxima + kStep) < least) return;
    Entry* to = all + c * kRoom;
    for (int64_t i = 0; i < chunk.width; i += vec::kLanes) {
      const vec::Floats x = vec::load(chunk.x + i);
      const vec::Ints kept = (x >= least) & keep(x);
      if (!any(kept)) continue;
      for (int j = 0; j < vec::kLanes; ++j) {
        *to = {chunk.x[i + j], static_cast<int32_t>(chunk.first + i + j)};
        to += kept[j] & 1;
      }
    }
    found[c] = to - (all + c * kRoom);
  });
  int64_t count = found[0];
  for (int64_t c = 1; c < chunks(); ++c) {
    std::copy(all + c * kRoom, all + c * kRoom + found[c], all + count);
    count += found[c];
  }
  return count;
}

int64_t Row::best(int64_t count, Entry** entries) const {
  // As many maxima are at least `least`: the entries wanted are, too.
  float least = kLowest;
  const int64_t maxima = chunks() * kStep;
  if (count < maxima) {
    float* part = scratch<float>(kPart, maxima);
    std::copy(maxima_, maxima_ + maxima, part);
    std::nth_element(part, part + count - 1, part + maxima, [](float a, float b) { return a > b; });
    least = std::max(least, part[count - 1]);
  }
  Entry* all = *entries = scratch<Entry>(kEntries, chunks() * kRoom);
  const int64_t found = gather([](vec::Floats x) { return x == x; }, least, all);
  count = std::min(count, found);
  if (count < found) std::nth_element(all, all + count, all + found, ahead);
  std::sort(all, all + count, ahead);
  return count;
}

int64_t Row::in_bin(int bin, Entry** entries) const {
  const Heat heat{top_, temperature_};
  const float from = static_cast<float>(bin), to = from + 1.0f;
  Entry* all = *entries = scratch<Entry>(kEntries, chunks() * kRoom);
  const auto keep = [=](vec::Floats x) {
    const vec::Floats place = Heat::bin(heat.power(x));
    return (place >= from) & (place < to);
  };
  const int64_t found = gather(keep, kLowest, all);
  // Ties come in order already: what is equal need not be sorted.
  std::stable_sort(all, all + found, [](const Entry& a, const Entry& b) { return a.value > b.value; });
  return found;
}

}  // namespace qwen_mtp
