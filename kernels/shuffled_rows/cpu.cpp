// shuffled_rows in C++: entries are independent of one another, and stay in registers from the first round to the last.

#include <cstdint>

#include "../common/product.h"

namespace {

// The quotient of a number below 2^62 by one whose reciprocal this is, and the remainder: see `reciprocal` in op.py.
struct divisor {
  uint64_t n, reciprocal;

  inline uint64_t divide(uint64_t h, uint64_t* remainder) const {
    const uint64_t q = upper_product(2 * h, reciprocal);
    const uint64_t r = h - q * n;
    const bool one_less = r >= n;
    *remainder = one_less ? r - n : r;
    return q + one_less;
  }
};

// SplitMix64, as kernels/common/hashing.py.
inline uint64_t mix(uint64_t counter, uint64_t key) {
  uint64_t z = (counter + 1) * 0x9E3779B97F4A7C15ull + key;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// (i + F(j)) mod N
inline uint64_t next_half(uint64_t i, uint64_t j, uint64_t key, divisor side) {
  uint64_t step;
  side.divide((mix(j, key) >> 1) & 0x3FFFFFFFFFFFFFFFull, &step);
  const uint64_t sum = i + step;
  return sum >= side.n ? sum - side.n : sum;
}

template <class Id, bool kBlocks>
void shuffled_rows(const int64_t* entries, void* rows_at, void* blocks_at, int64_t M, divisor side, divisor window,
                   uint64_t first_row, uint64_t num_bank_rows, const uint64_t* round_keys, int64_t threads) {
  Id *rows = static_cast<Id*>(rows_at), *blocks = static_cast<Id*>(blocks_at);
  const uint64_t key_0 = round_keys[0], key_1 = round_keys[1], key_2 = round_keys[2], key_3 = round_keys[3];
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t e = 0; e < M; ++e) {
    uint64_t i, j, row;
    i = side.divide(static_cast<uint64_t>(entries[e]), &j);
    // (i, j) to (j, (i + F(j)) mod N), four times.
    i = next_half(i, j, key_0, side);
    j = next_half(j, i, key_1, side);
    i = next_half(i, j, key_2, side);
    j = next_half(j, i, key_3, side);
    const uint64_t block = window.divide(i * side.n + j, &row);
    row += first_row;
    rows[e] = static_cast<Id>(row >= num_bank_rows ? row - num_bank_rows : row);
    if (kBlocks) blocks[e] = static_cast<Id>(block);
  }
}

}  // namespace

// Rows and blocks are numbers of 64 bits where `wide`, else of 32.
extern "C" void megamem_shuffled_rows(int64_t wide, const int64_t* entries, void* rows, void* blocks, int64_t M,
                                      int64_t N, int64_t reciprocal_N, int64_t num_rows, int64_t reciprocal_rows,
                                      int64_t first_row, int64_t num_bank_rows, int64_t key_0, int64_t key_1,
                                      int64_t key_2, int64_t key_3, int64_t threads) {
  const divisor side{static_cast<uint64_t>(N), static_cast<uint64_t>(reciprocal_N)};
  const divisor window{static_cast<uint64_t>(num_rows), static_cast<uint64_t>(reciprocal_rows)};
  const uint64_t keys[4] = {static_cast<uint64_t>(key_0), static_cast<uint64_t>(key_1), static_cast<uint64_t>(key_2),
                            static_cast<uint64_t>(key_3)};
  const auto run = blocks == nullptr ? (wide ? shuffled_rows<int64_t, false> : shuffled_rows<int32_t, false>)
                                     : (wide ? shuffled_rows<int64_t, true> : shuffled_rows<int32_t, true>);
  run(entries, rows, blocks, M, side, window, static_cast<uint64_t>(first_row), static_cast<uint64_t>(num_bank_rows),
      keys, threads);
}
