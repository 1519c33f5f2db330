// One row of logits as the sampler reads it: in chunks of one size, whatever the threads are, so
// that a sum always has the same terms in the same order.
#pragma once

#include <vector>

#include "kernel.h"

namespace qwen_mtp {

constexpr int64_t kChunk = 8192;
constexpr int64_t kStep = 64;          // entries read at a time; a chunk has a maximum for each place
constexpr int kBins = 2048;            // of weights, descending
constexpr float kBinsPerUnit = 64.0f;  // a bin holds weights within a factor of e^(1/64)

struct Entry {
  float value;
  int32_t id;
};

// Part of a row: `width` logits from id `first` on, a multiple of kStep (minus infinity at the end).
struct Chunk {
  const float* x;
  int64_t first, width;
};

class Row {
 public:
  // The ids in `out` cannot be emitted; those outside the vocabulary mean none.
  Row(const Context& context, const float* logits, int64_t size, std::vector<int32_t> out = {})
      : context_(context), logits_(logits), size_(size), out_(std::move(out)) {}

  // Read the row once. False where it has no law: a NaN, or no finite maximum.
  bool read();
  // The first id of the largest logit; after `read`, as all that follows.
  int64_t argmax() const;
  int64_t size() const { return size_; }
  int64_t chunks() const { return (size_ + kChunk - 1) / kChunk; }
  float logit(int64_t id) const;
  // Take one more id out / put the last one back.
  void remove(int64_t id) { out_.push_back(static_cast<int32_t>(id)); }
  void restore() { out_.pop_back(); }

  // Weights e^((logit - largest) / temperature).
  void heat(float temperature) { temperature_ = temperature; }
  double weight(int64_t id) const;
  void weigh(const Entry* entries, int64_t count, double* weights) const;
  // The sum over chunk `c` / over each chunk.
  double mass(int64_t c) const;
  void masses(double* sums) const;
  // The id of chunk `c` at which a running sum passes `point`, else the last with a weight.
  int64_t walk(int64_t c, double sum, double point) const;
  // The sum over each of kBins bins, and the bin of a logit.
  void histogram(double* bins) const;
  int bin(float logit) const;

  // Finite logits in descending order, ties by id: the `count` largest of them, or one bin.
  // Returns how many there are; they stay until the next call.
  int64_t best(int64_t count, Entry** entries) const;
  int64_t in_bin(int bin, Entry** entries) const;

 private:
  Chunk view(int64_t c) const;
  template <class Task>
  void each(const Task& task) const {
    context_.parallel(chunks(), [&](size_t c) { task(c, view(c)); });
  }
  template <class Keep>
  int64_t gather(const Keep& keep, float least, Entry* all) const;

  const Context& context_;
  const float* logits_;
  int64_t size_;
  std::vector<int32_t> out_;
  float* maxima_ = nullptr;  // [chunks, kStep]
  float top_ = 0.0f, temperature_ = 1.0f;
};

}  // namespace qwen_mtp
