#include "rejection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "rejection_row.h"

namespace qwen_mtp {
namespace {

constexpr double kGreedyBelow = 1e-5;
constexpr double kBelowOne = 1.0 - 0x1p-53;  // keeps a point below the sum
constexpr int64_t kRungs[] = {64, 1024};     // candidates to try before all of them

struct Ask {
  float temperature, top_p;
  int64_t top_k;
};

// What is verified in a row and the numbers it is verified with; draft -1 for none.
struct Trial {
  int64_t draft;
  double accept, pick;
  bool accepts(double target) const { return draft >= 0 && accept < target; }
};

using Token = std::optional<int64_t>;  // nothing where the draft is kept

double sum_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (double value : values) sum += value;
  return sum;
}

// The first entry at which the running sum of the weights, without the draft's, passes `point`.
int64_t walk(const Entry* entries, const double* weights, int64_t count, int64_t draft, double sum, double point) {
  int64_t last = -1;
  for (int64_t i = 0; i < count && sum <= point; ++i) {
    if (entries[i].id == draft || weights[i] <= 0.0) continue;
    sum += weights[i];
    last = entries[i].id;
  }
  return last;
}

// A row all of whose candidates are in a list.
Token from_list(const Entry* entries, const double* weights, int64_t count, const Trial& trial) {
  double mass = 0.0, target = 0.0, left = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const bool mine = entries[i].id == trial.draft;
    mass += weights[i];
    (mine ? target : left) += weights[i];
  }
  if (trial.accepts(target / mass)) return {};
  const bool residual = left > 0.0;
  const double point = std::min(trial.pick, kBelowOne) * (residual ? left : mass);
  return walk(entries, weights, count, residual ? trial.draft : -1, 0.0, point);
}

Token greedy(const Row& row, const Trial& trial) {
  const Entry best{0.0f, static_cast<int32_t>(row.argmax())};
  const double weight = 1.0;
  return from_list(&best, &weight, 1, trial);
}

// The first part with which the running sum passes `point`, else the last that adds to it; `before`
// becomes the sum ahead of it.
size_t part_at(const std::vector<double>& sums, double point, double* before) {
  size_t found = 0;
  double sum = 0.0;
  for (size_t i = 0; i < sums.size() && sum <= point; ++i) {
    if (sums[i] <= 0.0) continue;
    found = i;
    *before = sum;
    sum += sums[i];
  }
  return found;
}

// Temperature alone: candidates in the order of the vocabulary.
Token plain(Row& row, const Trial& trial) {
  std::vector<double> sums(row.chunks());
  row.masses(sums.data());
  if (trial.draft >= 0) {
    if (trial.accepts(row.weight(trial.draft) / sum_of(sums))) return {};
    const int64_t chunk = trial.draft / kChunk;
    const double whole = sums[chunk];
    row.remove(trial.draft);
    sums[chunk] = row.mass(chunk);
    if (sum_of(sums) <= 0.0) {
      row.restore();
      sums[chunk] = whole;
    }
  }
  double before = 0.0;
  const double point = std::min(trial.pick, kBelowOne) * sum_of(sums);
  const size_t chunk = part_at(sums, point, &before);
  return row.walk(chunk, before, point);
}

// Candidates by descending logit, as few as hold what the row keeps.
class Sorted {
 public:
  explicit Sorted(Row& row) : row_(row) {}

  Token drawn(const Ask& ask, const Trial& trial) {
    if (ask.top_k > 0) {
      take(row_.best(std::min(ask.top_k, row_.size()), &entries_));
      return listed(ask.top_p < 1.0f ? ask.top_p * sum_of(weights_) : kAll, trial);
    }
    std::vector<double> sums(row_.chunks());
    row_.masses(sums.data());
    const double need = ask.top_p * sum_of(sums);
    for (int64_t rung : kRungs) {
      if (static_cast<double>(rung) < need) continue;  // no weight is above 1
      take(row_.best(rung, &entries_));
      if (count() < rung || sum_of(weights_) >= need) return listed(need, trial);
    }
    return binned(need, trial);
  }

 private:
  static constexpr double kAll = std::numeric_limits<double>::infinity();

  int64_t count() const { return static_cast<int64_t>(weights_.size()); }

  void take(int64_t count) {
    weights_.resize(count);
    row_.weigh(entries_, count, weights_.data());
  }

  // How many of the entries top-p keeps when `before` lies ahead of them.
  int64_t kept(double before, double need) const {
    int64_t n = 0;
    while (n < count() && before < need) before += weights_[n++];
    return n;
  }

  Token listed(double need, const Trial& trial) const {
    const int64_t n = std::max<int64_t>(kept(0.0, need), 1);
    return from_list(entries_, weights_.data(), n, trial);
  }

  // Too many to sort: sums over bins of like weights, and the order within the bin that is cut
  // and the one that is drawn from.
  Token binned(double need, const Trial& trial) {
    std::vector<double> bins(kBins);
    row_.histogram(bins.data());
    double before = 0.0;
    int cut = 0;
    while (cut < kBins && before + bins[cut] < need) before += bins[cut++];
    bins.resize(std::min(cut + 1, kBins));
    if (cut < kBins) {
      take(row_.in_bin(cut, &entries_));
      weights_.resize(kept(before, need));
      bins[cut] = sum_of(weights_);
    }
    const int home = trial.draft < 0 ? kBins : row_.bin(row_.logit(trial.draft));
    const double weight = home < cut ? row_.weight(trial.draft) : home == cut ? weight_of(trial.draft) : 0.0;
    if (trial.accepts(weight / sum_of(bins))) return {};
    if (weight > 0.0) bins[home] -= weight;
    return from_bins(bins, cut, trial);
  }

  double weight_of(int64_t id) const {
    for (int64_t i = 0; i < count(); ++i) {
      if (entries_[i].id == id) return weights_[i];
    }
    return 0.0;
  }

  Token from_bins(const std::vector<double>& bins, int cut, const Trial& trial) {
    double before = 0.0;
    const double point = std::min(trial.pick, kBelowOne) * sum_of(bins);
    const int bin = static_cast<int>(part_at(bins, point, &before));
    if (bin != cut) take(row_.in_bin(bin, &entries_));
    return walk(entries_, weights_.data(), count(), trial.draft, before, point);
  }

  Row& row_;
  Entry* entries_ = nullptr;
  std::vector<double> weights_;
};

Token drawn(Row& row, const Ask& ask, const Trial& trial) {
  if (ask.temperature < kGreedyBelow) return greedy(row, trial);
  row.heat(ask.temperature);
  if (ask.top_k <= 0 && ask.top_p >= 1.0f) return plain(row, trial);
  return Sorted(row).drawn(ask, trial);
}

}  // namespace

void RejectionSample::run(const Context& context) const {
  const int64_t slots = context.dimension(0, 0), rows = context.dimension(0, 1);
  const int64_t size = context.dimension(0, 2), stops = context.dimension(9, 1), most = rows - 1;
  const float *logits = context.input<float>(0), *accept = context.input<float>(3);
  const float *pick = context.input<float>(4), *temperature = context.input<float>(5);
  const float* top_p = context.input<float>(7);
  const int32_t *drafts = context.input<int32_t>(1), *counts = context.input<int32_t>(2);
  const int32_t *top_k = context.input<int32_t>(6), *banned = context.input<int32_t>(8);
  const int32_t* stop_ids = context.input<int32_t>(9);
  int32_t* tokens = context.output<int32_t>(0, {slots, rows});
  int32_t* accepted = context.output<int32_t>(1, {slots});
  for (int64_t b = 0; b < slots; ++b) {
    const int64_t count = std::clamp<int64_t>(counts[b], 0, most);
    const Ask ask{temperature[b], top_p[b], top_k[b]};
    std::fill(tokens + b * rows, tokens + (b + 1) * rows, -1);
    for (int64_t i = 0; i <= count; ++i) {
      const int64_t draft = i < count ? drafts[b * most + i] : -1;
      const Trial trial{draft < size ? std::max<int64_t>(draft, -1) : -1,
                        i < count ? accept[b * most + i] : 0.0, pick[b * rows + i]};
      const auto out = i < banned[b] ? std::vector<int32_t>(stop_ids + b * stops, stop_ids + (b + 1) * stops)
                                     : std::vector<int32_t>{};
      Row row(context, logits + (b * rows + i) * size, size, out);
      const Token token = row.read() ? drawn(row, ask, trial) : Token{-1};
      tokens[b * rows + i] = static_cast<int32_t>(token.value_or(draft));
      accepted[b] = static_cast<int32_t>(i);
      if (token) break;
    }
  }
}

void ArgMaxRows::run(const Context& context) const {
  const int64_t rows = context.dimension(0, 0), size = context.dimension(0, 1);
  const float* x = context.input<float>(0);
  int64_t* best = context.output<int64_t>(0, {rows});
  for (int64_t m = 0; m < rows; ++m) {
    Row row(context, x + m * size, size);
    row.read();
    best[m] = row.argmax();
  }
}

}  // namespace qwen_mtp
