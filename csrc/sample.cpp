// Which token a draw takes, exactly, without sorting the vocabulary.
//
//   logits --scan--> maxima per chunk --floor--> candidates, ascending ids --cut--> kept --draw--> token
//
//   floor   a logit under which no kept token can lie; chunks whose maxima are all under it are skipped
//             top_k   the k-th largest of the maxima: at least k logits reach it
//             top_p   tokens of weight under (1 - p) / V of all weigh less than 1 - p together
//             min_p   from the logarithm
//   cut     the last (logit, id) that is kept, in the order of falling logits and, among equals, rising ids
//   draw    in the order of ids: the first token at which the running sum of weights exceeds u * sum
//
// Weights are whole numbers (weigh.h), so every sum here is exact, and octavo/ops/sorting.py, which sorts,
// finds the same tokens. Compiled once, for the baseline: the passes over logits are in OpsKernels.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>

#include "ops.h"
#include "parallel.h"

namespace octavo {
namespace {

constexpr float kDeepest = 28.0f;      // weights are 0 this far below the maximum: weigh.h
constexpr int kBuckets = 28 * 32;      // of exponents, for cuts among many candidates
constexpr int64_t kFewCandidates = 256;
constexpr int64_t kSerialCost = 1 << 20;  // less is done sooner than a thread wakes; see cost

struct Cut {
  float logit;
  int32_t id;
  bool keeps(float other, int32_t other_id) const {
    return (other > logit) | ((other == logit) & (other_id <= id));
  }
};

struct Candidate {
  float logit;
  int32_t id;
  int64_t weight;
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// Philox 4x64-10 (Salmon and others, 2011), as numpy's Philox(key, counter).random() draws first: the counter
// goes up by one, and the first word's upper 53 bits are the number in [0, 1).
double uniform(uint64_t seed, uint64_t branch, uint64_t position) {
  uint64_t c[4] = {1, position, 0, 0}, key[2] = {seed, branch};
  for (int round = 0; round < 10; ++round) {
    const unsigned __int128 a = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * c[0];
    const unsigned __int128 b = static_cast<unsigned __int128>(0xCA5A826395121157u) * c[2];
    const uint64_t next[4] = {uint64_t(b >> 64) ^ c[1] ^ key[0], uint64_t(b),
                              uint64_t(a >> 64) ^ c[3] ^ key[1], uint64_t(a)};
    std::memcpy(c, next, sizeof c);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return double(c[0] >> 11) * 0x1p-53;
}

// The smallest whole number that is not under share * sum; at least 1.
int64_t share_of(int64_t sum, double share) {
  return std::max<int64_t>(1, int64_t(std::ceil(share * double(sum))));
}

bool limits_k(const Draw& draw, int64_t vocab) { return draw.top_k > 0 && draw.top_k < vocab; }

// Of a draw, in logits looked at once. To weigh one takes about four times as long.
int64_t cost(const Draw& draw, int64_t vocab) {
  const bool weighs_all =
      draw.temperature > 0 && !limits_k(draw, vocab) && (draw.top_p < 1 || draw.min_p <= 0);
  return weighs_all ? 5 * vocab : vocab;
}

// The work on one row; buffers last from row to row.
class Row {
 public:
  // Scans the row. Returns whether its logits are good.
  bool open(const OpsKernels& kernels, const float* logits, int64_t vocab) {
    kernels_ = &kernels, logits_ = logits, vocab_ = vocab;
    chunks_ = (vocab + kChunk - 1) / kChunk;
    maxima_.resize(size_t(chunks_) * kMaxima);
    const Scan found = kernels.scan(logits, vocab, maxima_.data());
    max_ = found.max;
    return !found.bad;
  }

  int32_t likeliest() {
    gather(max_);
    return ids_[0];
  }

  int32_t pick(const Draw& draw) {
    const double u = uniform(draw.seed, draw.branch, draw.position);
    if (!limits_k(draw, vocab_) && draw.top_p >= 1 && draw.min_p <= 0) return pick_of_all(draw, u);
    select(draw);
    const int64_t target = place(u, sum());
    int64_t running = 0;
    for (size_t i = 0; i < ids_.size(); ++i)
      if ((running += weights_[i]) > target) return ids_[i];
    return ids_.back();
  }

  // Leaves the kept tokens in ids() and their weights, all above 0, in weights().
  void select(const Draw& draw) {
    if (limits_k(draw, vocab_)) {
      gather(top_k_floor(draw.top_k));
      cut_to_count(draw.top_k);
      weigh(draw);
      if (draw.top_p < 1) cut_to_mass(draw, share_of(sum(), draw.top_p));
    } else if (draw.top_p < 1) {
      const int64_t all = sum_of_chunks(draw), target = share_of(all, draw.top_p);
      gather(top_p_floor(draw, (all - target) / vocab_));
      weigh(draw);
      cut_to_mass(draw, target);
    } else {
      gather(floor_at(draw, draw.min_p > 0 ? std::log(draw.min_p) - 1e-3 : -kDeepest));
      weigh(draw);
    }
    const int64_t least = draw.min_p > 0 ? share_of(int64_t(1) << 40, draw.min_p) : 1;
    keep_if([&](size_t i) { return weights_[i] >= least; });
  }

  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<int64_t>& weights() const { return weights_; }

 private:
  int64_t sum() const {
    int64_t total = 0;
    for (const int64_t weight : weights_) total += weight;
    return total;
  }

  static int64_t place(double u, int64_t sum) { return std::min(int64_t(u * double(sum)), sum - 1); }

  int64_t sum_of_chunks(const Draw& draw) {
    sums_.resize(size_t(chunks_));
    kernels_->chunk_sums(logits_, vocab_, max_, draw.temperature, sums_.data());
    int64_t total = 0;
    for (const int64_t part : sums_) total += part;
    return total;
  }

  int32_t pick_of_all(const Draw& draw, double u) {
    int64_t target = place(u, sum_of_chunks(draw));
    int64_t chunk = 0;
    while (target >= sums_[size_t(chunk)]) target -= sums_[size_t(chunk++)];
    const int64_t first = chunk * kChunk, size = std::min<int64_t>(kChunk, vocab_ - first);
    weights_.resize(size_t(size));
    kernels_->weights(logits_ + first, size, max_, draw.temperature, weights_.data());
    int64_t i = 0;
    while (target >= weights_[size_t(i)]) target -= weights_[size_t(i++)];
    return int32_t(first + i);
  }

  // Candidates: ids, ascending, of logits not under the floor.
  void gather(float floor) {
    if (int64_t(room_.size()) < vocab_) room_.resize(size_t(vocab_));
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const float* maxima = maxima_.data() + chunk * kMaxima;
      if (*std::max_element(maxima, maxima + kMaxima) < floor) continue;
      const int64_t first = chunk * kChunk, size = std::min<int64_t>(kChunk, vocab_ - first);
      count += kernels_->gather(logits_ + first, size, floor, int32_t(first), room_.data() + count);
    }
    ids_.assign(room_.begin(), room_.begin() + count);
  }

  void weigh(const Draw& draw) {
    values_.resize(ids_.size());
    weights_.resize(ids_.size());
    for (size_t i = 0; i < ids_.size(); ++i) values_[i] = logits_[ids_[i]];
    kernels_->weights(values_.data(), int64_t(ids_.size()), max_, draw.temperature, weights_.data());
  }

  template <class Keep>
  void keep_if(Keep keep) {
    size_t kept = 0;
    for (size_t i = 0; i < ids_.size(); ++i) {  // without branches, which would be guessed wrong
      ids_[kept] = ids_[i];
      weights_[kept] = weights_[i];
      kept += keep(i);
    }
    ids_.resize(kept);
    weights_.resize(kept);
  }

  // A logit that at least k logits reach.
  float top_k_floor(int64_t k) {
    if (k <= int64_t(maxima_.size())) {
      values_.assign(maxima_.begin(), maxima_.end());
      std::nth_element(values_.begin(), values_.begin() + (k - 1), values_.end(), std::greater<float>());
      return values_[size_t(k - 1)];
    }
    // More than there are maxima: a histogram of the logits' patterns, which rise with the logits when the
    // negative ones are turned round. The upper 11 bits are sign, exponent and two bits more.
    int64_t counts[2048] = {};
    for (int64_t i = 0; i < vocab_; ++i) ++counts[rising(logits_[i]) >> 21];
    int bucket = 2047;
    for (int64_t reached = 0; bucket > 0 && (reached += counts[bucket]) < k;) --bucket;
    return falling(uint32_t(bucket) << 21);
  }

  static uint32_t rising(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  static float falling(uint32_t bits) {  // of a bucket's first pattern; a NaN's becomes -infinity
    bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x == x ? x : -INFINITY;
  }

  float top_p_floor(const Draw& draw, int64_t light) const {
    // Under a thousand units the rounding of weights would matter, so then all with any weight are taken.
    if (light < 1000) return floor_at(draw, -kDeepest);
    return floor_at(draw, std::log(double(light) * 0x1p-40) - 1e-3);
  }

  // No logit under the result has an exponent of `exponent` or more. The 1e-3 that callers take off covers
  // the rounding of exponents; here it is the result that must not be rounded up.
  float floor_at(const Draw& draw, double exponent) const {
    exponent = std::max(exponent, -double(kDeepest) - 1e-3);
    const float floor = float(double(max_) + double(draw.temperature) * exponent);
    return std::min(max_, std::nextafter(floor, -INFINITY));
  }

  void cut_to_count(int64_t k) {
    if (int64_t(ids_.size()) <= k) return;
    sorted_.clear();
    for (const int32_t id : ids_) sorted_.push_back({logits_[id], id, 0});
    std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end());
    const Cut cut{sorted_[size_t(k - 1)].logit, sorted_[size_t(k - 1)].id};
    weights_.resize(ids_.size());
    keep_if([&](size_t i) { return cut.keeps(logits_[ids_[i]], ids_[i]); });
  }

  // Keeps the fewest leading candidates that weigh `target` together.
  void cut_to_mass(const Draw& draw, int64_t target) {
    sorted_.clear();
    int64_t before = 0;
    if (int64_t(ids_.size()) <= kFewCandidates) {
      for (size_t i = 0; i < ids_.size(); ++i) sorted_.push_back({values_[i], ids_[i], weights_[i]});
    } else {
      // Buckets of exponents fall with logits, so only the one where the target is reached needs an order.
      std::fill(mass_, mass_ + kBuckets, 0);
      const float scale = 32.0f / draw.temperature;
      buckets_.resize(ids_.size());
      for (size_t i = 0; i < ids_.size(); ++i) {
        const float place = (max_ - values_[i]) * scale;
        buckets_[i] = place < kBuckets - 1 ? int(place) : kBuckets - 1;
      }
      for (size_t i = 0; i < ids_.size(); ++i) mass_[buckets_[i]] += weights_[i];
      int bucket = 0;
      while (bucket < kBuckets - 1 && before + mass_[bucket] < target) before += mass_[bucket++];
      for (size_t i = 0; i < ids_.size(); ++i)
        if (buckets_[i] == bucket) sorted_.push_back({values_[i], ids_[i], weights_[i]});
    }
    std::sort(sorted_.begin(), sorted_.end());
    for (const Candidate& candidate : sorted_) {
      if ((before += candidate.weight) < target) continue;
      const Cut cut{candidate.logit, candidate.id};
      return keep_if([&](size_t i) { return cut.keeps(values_[i], ids_[i]); });
    }
  }

  const OpsKernels* kernels_ = nullptr;
  const float* logits_ = nullptr;
  int64_t vocab_ = 0, chunks_ = 0;
  float max_ = 0;
  std::vector<float> maxima_, values_;
  std::vector<int32_t> ids_, room_, buckets_;
  std::vector<int64_t> weights_, sums_;
  std::vector<Candidate> sorted_;
  int64_t mass_[kBuckets];
};

}  // namespace

std::vector<int64_t> Ops::sample(const std::vector<Draw>& draws, int64_t vocab, int threads) const {
  const int64_t count = int64_t(draws.size());
  std::vector<int64_t> tokens(draws.size(), -1);
  std::atomic<int64_t> next{0};
  auto work = [&](int) {
    static thread_local Row row;  // so that its buffers are there at the next step
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const Draw& draw = draws[size_t(i)];
      if (!row.open(*kernels_, draw.logits, vocab)) continue;
      tokens[size_t(i)] = draw.temperature > 0 ? row.pick(draw) : row.likeliest();
    }
  };
  int64_t total = 0;
  for (const Draw& draw : draws) total += cost(draw, vocab);
  on_threads(total < kSerialCost ? 1 : std::max(1, std::min(threads, int(count))), work);
  return tokens;
}

int64_t Ops::candidates(const Draw& draw, int64_t vocab, int64_t* ids, int64_t* weights) const {
  Row row;
  if (!row.open(*kernels_, draw.logits, vocab)) return -1;
  row.select(draw);
  std::copy(row.ids().begin(), row.ids().end(), ids);
  std::copy(row.weights().begin(), row.weights().end(), weights);
  return int64_t(row.ids().size());
}

}  // namespace octavo
