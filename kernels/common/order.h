// The order of retrieval in C++, and the best K of a list in it: see kernels/list_topk/README.md.
//
// A score becomes an integer, its key, of the same order: larger scores have larger keys, 0 and -0 the same, NaN the
// largest. Of equal keys the smaller position comes first.
//
// Legend: N entries of a list, K kept.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

template <class Score>
struct order_of;

template <>
struct order_of<float> {
  using key = int32_t;
};

template <>
struct order_of<double> {
  using key = int64_t;
};

template <class Score>
using key_of = typename order_of<Score>::key;

template <class Score>
inline key_of<Score> ordered_key(Score score) {
  using Key = key_of<Score>;
  constexpr Key kLargest = std::numeric_limits<Key>::max();
  // -0 + 0 is 0.
  const Score whole = score + Score{0};
  Key bits;
  std::memcpy(&bits, &whole, sizeof bits);
  const Key key = bits ^ ((bits >> (8 * sizeof(Key) - 1)) & kLargest);
  return whole != whole ? kLargest : key;
}

// Keys that are looked at together for which of them are among the best.
constexpr int64_t kBlock = 64;

// Of n keys, those that reach the threshold.
template <class Key>
inline int64_t count(const Key* keys, int64_t n, Key threshold) {
  // A sum as wide as a key: comparisons of a vector are added to a vector.
  Key found = 0;
  for (int64_t i = 0; i < n; ++i) found += keys[i] >= threshold;
  return found;
}

// A bit for each of `kBlock` keys, set if it reaches the threshold.
template <class Key>
inline uint64_t reaching(const Key* keys, Key threshold) {
  constexpr int64_t kPart = 16;
  uint64_t reached = 0;
  for (int64_t first = 0; first < kBlock; first += kPart) {
    uint64_t part = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(Key) == 4) {
      part = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + first), _mm512_set1_epi32(threshold));
      reached |= part << first;
      continue;
    }
#endif
    // Most parts have none.
    if (!count(keys + first, kPart, threshold)) continue;
    for (int64_t i = 0; i < kPart; ++i) part |= static_cast<uint64_t>(keys[first + i] >= threshold) << i;
    reached |= part << first;
  }
  return reached;
}

// The positions of the best K of a list of keys, best first. Keeps its scratch from one list to the next.
template <class Score>
class Best {
  using Key = key_of<Score>;

 public:
  static constexpr Key kLeast = std::numeric_limits<Key>::min();

  // Groups of a list whose largest keys say how large a key at least K entries reach, and the least list that has them.
  static int64_t num_groups(int64_t top_k) { return 4 * top_k; }
  static bool has_groups(int64_t n, int64_t top_k) { return n > most_ranked(top_k) && n >= 2 * num_groups(top_k); }

  void operator()(const Key* keys, int64_t n, int64_t top_k, int32_t* positions) {
    if (has_groups(n, top_k)) {
      const int64_t groups = num_groups(top_k);
      largest_.assign(keys, keys + groups);
      for (int64_t start = groups; start < n; start += groups) {
        const int64_t length = std::min(groups, n - start);
        for (int64_t g = 0; g < length; ++g) largest_[g] = std::max(largest_[g], keys[start + g]);
      }
      return of_groups(keys, n, largest_.data(), groups, top_k, positions);
    }
    const int64_t most = most_ranked(top_k);
    reaching_threshold(keys, n, n > most ? threshold(keys, n, kLeast, top_k, most) : kLeast, top_k, positions);
  }

  // The same, given the largest key of each of at least K groups that the list falls into.
  void of_groups(const Key* keys, int64_t n, const Key* largest, int64_t groups, int64_t top_k, int32_t* positions) {
    // The K-th of the largest. Of entries that fall into 4 K groups by chance 4 K ln 4/3 = 1.15 K reach it.
    reaching_threshold(keys, n, threshold(largest, groups, kLeast, top_k, top_k), top_k, positions);
  }

 private:
  // A few more than K are ranked rather than told apart before.
  static int64_t most_ranked(int64_t top_k) { return top_k + top_k / 2 + 8; }

  void reaching_threshold(const Key* keys, int64_t n, Key low, int64_t top_k, int32_t* positions) {
    const int64_t most = most_ranked(top_k);
    collect(keys, n, low, top_k);
    if (num_kept_ > most) collect(keys, n, threshold(keys, n, low, top_k, most), top_k);
    rank(top_k, positions);
  }

  // A key that at least K entries reach, and at most `most` if equal ones do not make them more. At least K reach `low`.
  static Key threshold(const Key* keys, int64_t n, Key low, int64_t top_k, int64_t most) {
    Key least = std::numeric_limits<Key>::max(), high = kLeast;
    for (int64_t i = 0; i < n; ++i) least = std::min(least, keys[i]);
    for (int64_t i = 0; i < n; ++i) high = std::max(high, keys[i]);
    low = std::max(low, least);
    // Fewer than K reach what is above `high`. One step per bit of a key at most.
    while (low < high) {
      // Half of the way up, of which an odd one is rounded up. It may need all bits.
      using Unsigned = std::make_unsigned_t<Key>;
      const Unsigned way = static_cast<Unsigned>(high) - static_cast<Unsigned>(low);
      const Key middle = static_cast<Key>(static_cast<Unsigned>(low) + way / 2 + way % 2);
      const int64_t reached = count(keys, n, middle);
      if (reached < top_k) {
        high = middle - 1;
      } else {
        low = middle;
        if (reached <= most) break;
      }
    }
    return low;
  }

  // Keeps the entries that reach the threshold. Of those equal to it K are enough, the first ones.
  void collect(const Key* keys, int64_t n, Key threshold, int64_t top_k) {
    found_.resize(n + 1);
    kept_.resize(n + kLane);
    int32_t* const found = found_.data();
    Key* const kept = kept_.data();
    int64_t num_kept = 0, i = 0;
    const auto keep = [&](int32_t position, Key key, bool wanted) {
      found[num_kept] = position;
      kept[num_kept] = key;
      num_kept += wanted;
    };
    for (; i + kBlock <= n; i += kBlock)
      for (uint64_t left = reaching(keys + i, threshold); left != 0; left &= left - 1) {
        const int64_t first = i + __builtin_ctzll(left);
        keep(first, keys[first], true);
      }
    for (; i < n; ++i) keep(i, keys[i], keys[i] >= threshold);
    if (num_kept > most_ranked(top_k)) {
      const int64_t num_found = num_kept;
      int64_t num_equal = 0;
      num_kept = 0;
      for (int64_t f = 0; f < num_found; ++f) {
        num_equal += kept[f] == threshold;
        keep(found[f], kept[f], kept[f] > threshold || num_equal <= top_k);
      }
    }
    num_kept_ = num_kept;
  }

  // The kept entries' positions in their order: that of an entry at the number of those that come before it. They lie in
  // the order of their positions, so of equal keys the first comes first.
  void rank(int64_t top_k, int32_t* positions) {
    if (num_kept_ > kMostCompared) return sort(top_k, positions);
    places_.resize(kMostCompared);
    for (int64_t first = 0; first < num_kept_; first += kLane) {
      // Each with all others, in vectors and without a branch. What lies behind the last is compared, and not used.
      const Key* lane = kept_.data() + first;
      Key before[kLane] = {};
      for (int64_t other = 0; other < first; ++other)
        for (Key e = 0; e < kLane; ++e) before[e] += kept_[other] >= lane[e];
      const Key width = std::min<int64_t>(kLane, num_kept_ - first);
      for (Key other = 0; other < width; ++other)
        for (Key e = 0; e < kLane; ++e)
          before[e] += (lane[other] > lane[e]) | ((lane[other] == lane[e]) & (other < e));
      for (int64_t other = first + width; other < num_kept_; ++other)
        for (Key e = 0; e < kLane; ++e) before[e] += kept_[other] > lane[e];
      for (Key e = 0; e < width; ++e) places_[before[e]] = found_[first + e];
    }
    std::copy(places_.begin(), places_.begin() + top_k, positions);
  }

  void sort(int64_t top_k, int32_t* positions) {
    places_.resize(num_kept_);
    std::iota(places_.begin(), places_.end(), 0);
    std::stable_sort(places_.begin(), places_.end(), [&](int32_t a, int32_t b) { return kept_[a] > kept_[b]; });
    for (int64_t k = 0; k < top_k; ++k) positions[k] = found_[places_[k]];
  }

  // Entries that are ranked at a time, in a few registers, and the most for which that is faster than to sort.
  static constexpr int64_t kLane = 32, kMostCompared = 512;
  // Of the entries that reach a threshold: their number, keys, and positions.
  int64_t num_kept_ = 0;
  std::vector<Key> kept_, largest_;
  std::vector<int32_t> found_, places_;
};

}  // namespace
