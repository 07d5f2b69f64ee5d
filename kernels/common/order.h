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
#include <functional>
#include <limits>
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
  // A key above a position from the end: larger ones come first, and no two are equal.
  using entry = int64_t;
};

template <>
struct order_of<double> {
  using key = int64_t;
  using entry = __int128;
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

// Of n keys, those that reach the threshold.
template <class Key>
inline Key count(const Key* keys, int64_t n, Key threshold) {
  // A sum as wide as a key: comparisons of a vector are added to a vector.
  Key found = 0;
  for (int64_t i = 0; i < n; ++i) found += keys[i] >= threshold;
  return found;
}

// Keys that are looked at together for whether any is among the best.
constexpr int64_t kBlock = 16;

// Writes the positions of those of `kBlock` keys, the first of them at `start`, that reach the threshold, and returns their
// number. May write to all of `found`.
template <class Key>
inline int64_t reaching(const Key* keys, Key threshold, int32_t start, int32_t* found) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Key) == 4) {
    // Without a branch: most blocks have none or one, which is hard to foresee.
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 reached = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys), _mm512_set1_epi32(threshold));
    const __m512i positions = _mm512_add_epi32(_mm512_set1_epi32(start), places);
    _mm512_storeu_si512(found, _mm512_maskz_compress_epi32(reached, positions));
    return __builtin_popcount(reached);
  }
#endif
  if (!count(keys, kBlock, threshold)) return 0;
  int64_t num_found = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    found[num_found] = start + i;
    num_found += keys[i] >= threshold;
  }
  return num_found;
}

// The positions of the best K of a list of keys, best first. Keeps its scratch from one list to the next.
template <class Score>
class Best {
  using Key = key_of<Score>;
  using Entry = typename order_of<Score>::entry;

 public:
  void operator()(const Key* keys, int64_t n, int64_t top_k, int32_t* positions) {
    // A few more than K are ranked rather than told apart before.
    const int64_t most = top_k + top_k / 2 + 8;
    Key low = kLeast;
    if (n > most) low = n >= 4 * top_k ? reached_by_groups(keys, n, top_k) : threshold(keys, n, low, top_k, most);
    collect(keys, n, low, top_k);
    if (static_cast<int64_t>(entries_.size()) > most) collect(keys, n, threshold(keys, n, low, top_k, most), top_k);
    rank(top_k, positions);
  }

 private:
  // A key that at least K entries reach: the K-th of the largest of 2 K groups. Entries that fall into groups by chance are
  // 2 K ln 2 = 1.4 K to reach it.
  Key reached_by_groups(const Key* keys, int64_t n, int64_t top_k) {
    const int64_t num_groups = 2 * top_k;
    largest_.assign(keys, keys + num_groups);
    for (int64_t start = num_groups; start < n; start += num_groups) {
      const int64_t length = std::min(num_groups, n - start);
      for (int64_t g = 0; g < length; ++g) largest_[g] = std::max(largest_[g], keys[start + g]);
    }
    return threshold(largest_.data(), num_groups, kLeast, top_k, top_k);
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
    found_.resize(n + kBlock);
    int64_t num_found = 0, i = 0;
    for (; i + kBlock <= n; i += kBlock) num_found += reaching(keys + i, threshold, i, found_.data() + num_found);
    for (; i < n; ++i)
      if (keys[i] >= threshold) found_[num_found++] = i;
    entries_.resize(num_found);
    int64_t num_equal = 0, num_entries = 0;
    for (int64_t f = 0; f < num_found; ++f) {
      const Key key = keys[found_[f]];
      entries_[num_entries] = static_cast<Entry>(key) * (Entry{1} << 32) + ~static_cast<uint32_t>(found_[f]);
      num_equal += key == threshold;
      num_entries += key > threshold || num_equal <= top_k;
    }
    entries_.resize(num_entries);
  }

  // The entries' positions in their order: that of an entry at the number of larger ones.
  void rank(int64_t top_k, int32_t* positions) {
    const int64_t num_entries = entries_.size();
    if (std::is_same_v<Entry, int64_t> && num_entries <= kMostCompared) {
      entries_.resize((num_entries + kLane - 1) / kLane * kLane, std::numeric_limits<Entry>::min());
      for (int64_t first = 0; first < num_entries; first += kLane) {
        // Each with all others, in vectors and without a branch.
        int64_t larger[kLane] = {};
        for (int64_t other = 0; other < num_entries; ++other)
          for (int64_t e = 0; e < kLane; ++e) larger[e] += entries_[other] > entries_[first + e];
        for (int64_t e = 0; e < kLane; ++e)
          if (larger[e] < top_k) positions[larger[e]] = position_of(entries_[first + e]);
      }
      return;
    }
    std::sort(entries_.begin(), entries_.end(), std::greater<Entry>());
    for (int64_t k = 0; k < top_k; ++k) positions[k] = position_of(entries_[k]);
  }

  static int32_t position_of(Entry entry) { return static_cast<int32_t>(~static_cast<uint32_t>(entry)); }

  static constexpr Key kLeast = std::numeric_limits<Key>::min();
  // Entries that are ranked at a time, in a few registers, and the most for which that is faster than to sort.
  static constexpr int64_t kLane = 32, kMostCompared = 512;
  std::vector<Entry> entries_;
  std::vector<Key> largest_;
  std::vector<int32_t> found_;
};

}  // namespace
