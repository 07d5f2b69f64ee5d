// gather_sum in C++: the weighted sums of a token's rows, in registers.

#include "../common/rows.h"

namespace {

// A token's rows of one column group: J ids and coefficients, of which `last_id` is the last of the whole list of ids.
// The table has `rows` rows.
template <class Row, class Operand>
struct Reads {
  const Row* table;
  const int32_t* ids;
  const int32_t* last_id;
  const Operand* coef;
  int64_t J, C, W, rows, ahead;

  bool has(int64_t j) const { return has_row(rows, ids[j]); }
  const Row* row(int64_t j) const { return table + ids[j] * W; }
  // The row that is read `ahead` entries later; the last one, where the list ends before; the first for one that others
  // hold, which costs less than a branch.
  const Row* later_row(int64_t j) const {
    const int32_t id = *std::min(ids + j + ahead, last_id);
    return table + (has_row(rows, id) ? id : 0) * W;
  }
};

// The weighted sum of a few columns, in registers.
template <class Row, int64_t kWidth = kLanes>
struct Sums {
  using Sum = typename sum_of<Row>::type;
  static constexpr int64_t kRegisters = 1, kColumns = kWidth;
  lanes<Sum, kWidth> all = {};

  template <class Operand>
  void add(const Row* row, Operand scale) {
    all += static_cast<Sum>(widen(scale)) * load<kWidth>(row);
  }
  void store(Sum* out) const { std::memcpy(out, &all, sizeof all); }
};

// A word of 32 bits holds two columns of bf16. Left where they are, each becomes fp32 by one instruction.
template <>
struct Sums<bf16, kLanes> {
  static constexpr int64_t kRegisters = 2, kColumns = 2 * kLanes;
  lanes<float> even = {}, odd = {};

  template <class Operand>
  void add(const bf16* row, Operand scale) {
    lanes<uint32_t> pairs;
    std::memcpy(&pairs, row, sizeof pairs);
    add_product(even, scale, reinterpret_cast<lanes<float>>(pairs << 16));
    add_product(odd, scale, reinterpret_cast<lanes<float>>(pairs & 0xffff0000u));
  }
  void store(float* out) const {
    for (int64_t i = 0; i < kLanes; ++i) {
      out[2 * i] = even[i];
      out[2 * i + 1] = odd[i];
    }
  }

 private:
  static void add_product(lanes<float>& sum, float scale, lanes<float> columns) { sum += scale * columns; }
  // The product of two values of bf16 is exact in fp32: fused with the sum it has the same bits.
  static void add_product(lanes<float>& sum, bf16 scale, lanes<float> columns) {
#if defined(__AVX512F__)
    sum = reinterpret_cast<lanes<float>>(_mm512_fmadd_ps(
        _mm512_set1_ps(widen(scale)), reinterpret_cast<__m512>(columns), reinterpret_cast<__m512>(sum)));
#elif defined(__AVX2__) && defined(__FMA__)
    sum = reinterpret_cast<lanes<float>>(_mm256_fmadd_ps(
        _mm256_set1_ps(widen(scale)), reinterpret_cast<__m256>(columns), reinterpret_cast<__m256>(sum)));
#else
    sum += widen(scale) * columns;
#endif
  }
};

// Vectors of sums that stay in registers: half of AVX-512's 32, or all that fit into others' 16 beside what is added to
// them.
#ifdef __AVX512F__
constexpr int64_t kMostVectors = 16;
#else
constexpr int64_t kMostVectors = 12;
#endif

// The weighted sum of kCount x Unit::kColumns columns from `first` on. The last of them end with column n at the
// latest: they may be some of the columns before, whose sums are then made twice.
template <class Unit, int64_t kCount, class Row, class Operand, class Sum>
inline void sum_in_registers(Sum* out, const Reads<Row, Operand>& reads, int64_t first, int64_t n) {
  constexpr int64_t kColumns = Unit::kColumns, kBytes = kCount * kColumns * sizeof(Row);
  const int64_t last = std::min((kCount - 1) * kColumns, n - first - kColumns);
  Unit sums[kCount];
  for (int64_t j = 0; j < reads.J; ++j) {
    prefetch_row(reads.later_row(j) + first, kBytes);
    if (!reads.has(j)) continue;
    const Row* row = reads.row(j) + first;
#pragma GCC unroll 16
    for (int64_t k = 0; k + 1 < kCount; ++k) sums[k].add(row + k * kColumns, reads.coef[j * reads.C]);
    sums[kCount - 1].add(row + last, reads.coef[j * reads.C]);
  }
  for (int64_t k = 0; k + 1 < kCount; ++k) sums[k].store(out + first + k * kColumns);
  sums[kCount - 1].store(out + first + last);
}

// The same with `count` known when it runs, at most kMost.
template <class Unit, int64_t kMost, class Row, class Operand, class Sum>
inline void sum_some(int64_t count, Sum* out, const Reads<Row, Operand>& reads, int64_t first, int64_t n) {
  if constexpr (kMost > 1)
    if (count < kMost) return sum_some<Unit, kMost - 1>(count, out, reads, first, n);
  sum_in_registers<Unit, kMost>(out, reads, first, n);
}

// Columns [0, n) of a token's weighted sum in `kMost` x Unit::kColumns columns per pass over its rows; n is at least
// Unit::kColumns.
template <class Unit, int64_t kMost, class Row, class Operand, class Sum>
inline void sum_in_passes(Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  for (int64_t first = 0; first < n; first += kMost * Unit::kColumns) {
    const int64_t count = std::min(kMost, (n - first + Unit::kColumns - 1) / Unit::kColumns);
    sum_some<Unit, kMost>(count, out, reads, first, n);
  }
}

// Both of two column groups, of n columns each, in one pass over a token's rows: kCount x Unit::kColumns columns of each,
// the last of which end with column n.
template <class Unit, int64_t kCount, class Row, class Operand, class Sum>
inline void sum_pair_in_registers(Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  const int64_t last = n - Unit::kColumns;
  const auto column = [&](int64_t k) { return k + 1 < kCount ? k * Unit::kColumns : last; };
  Unit first[kCount], second[kCount];
  for (int64_t j = 0; j < reads.J; ++j) {
    prefetch_row(reads.later_row(j), 2 * n * sizeof(Row));
    if (!reads.has(j)) continue;
    const Row* row = reads.row(j);
#pragma GCC unroll 16
    for (int64_t k = 0; k < kCount; ++k) first[k].add(row + column(k), reads.coef[2 * j]);
#pragma GCC unroll 16
    for (int64_t k = 0; k < kCount; ++k) second[k].add(row + n + column(k), reads.coef[2 * j + 1]);
  }
  for (int64_t k = 0; k < kCount; ++k) {
    first[k].store(out + column(k));
    second[k].store(out + n + column(k));
  }
}

// The same with `count` known when it runs, at most kMost.
template <class Unit, int64_t kMost, class Row, class Operand, class Sum>
inline void sum_pair(int64_t count, Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  if constexpr (kMost > 1)
    if (count < kMost) return sum_pair<Unit, kMost - 1>(count, out, reads, n);
  sum_pair_in_registers<Unit, kMost>(out, reads, n);
}

// Columns [0, n) of a token's weighted sum, all in one bin.
template <class Row, class Operand, class Sum>
inline void sum_columns(Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  using Wide = Sums<Row>;
  using Narrow = Sums<Row, kFewLanes>;
  if (n >= Wide::kColumns) return sum_in_passes<Wide, kMostVectors / Wide::kRegisters>(out, reads, n);
  if (n >= Narrow::kColumns) return sum_in_passes<Narrow, Wide::kColumns / Narrow::kColumns>(out, reads, n);
  std::fill(out, out + n, Sum(0));
  for (int64_t j = 0; j < reads.J; ++j) {
    prefetch_row(reads.later_row(j), n * sizeof(Row));
    if (reads.has(j)) add_scaled(out, reads.row(j), static_cast<Sum>(widen(reads.coef[j * reads.C])), n);
  }
}

// All column groups of a token's weighted sum, of n columns each and all in one bin.
template <class Row, class Operand, class Sum>
inline void sum_groups(Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  using Wide = Sums<Row>;
  using Narrow = Sums<Row, kFewLanes>;
  // A quarter of the vectors for each of two groups: with more a pass per group is faster.
  constexpr int64_t kWide = kMostVectors / 4 / Wide::kRegisters, kNarrow = Wide::kColumns / Narrow::kColumns;
  const auto units = [&](int64_t columns) { return (n + columns - 1) / columns; };
  if (reads.C == 2 && n >= Wide::kColumns && units(Wide::kColumns) <= kWide)
    return sum_pair<Wide, kWide>(units(Wide::kColumns), out, reads, n);
  if (reads.C == 2 && n >= Narrow::kColumns && n < Wide::kColumns)
    return sum_pair<Narrow, kNarrow>(units(Narrow::kColumns), out, reads, n);
  Reads<Row, Operand> group = reads;
  for (int64_t c = 0; c < reads.C; ++c, group.table += n, ++group.coef) sum_columns(out + c * n, group, n);
}

// out[t, b, group c] = sum_{j: bins[t, j] = b} coef[t, j, c] table[ids[t, j], group c]
template <class Row, class Operand>
void gather_sum(const void* table_at, const int32_t* ids, const void* coef_at, const int32_t* bins, void* out_at,
                int64_t T, int64_t J, int64_t C, int64_t W, int64_t B, int64_t rows, int64_t threads) {
  using Sum = typename sum_of<Row>::type;
  const Row* table = static_cast<const Row*>(table_at);
  const Operand* coef = static_cast<const Operand*>(coef_at);
  Row* out = static_cast<Row*>(out_at);
  const int64_t per_group = W / C, M = T * J, ahead = rows_ahead(W * sizeof(Row));
#pragma omp parallel num_threads(threads_for(threads, T))
  {
    std::vector<Sum> sums(B * W);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) {
      if (bins == nullptr) {
        sum_groups(sums.data(), Reads<Row, Operand>{table, ids + t * J, ids + M - 1, coef + t * J * C, J, C, W, rows,
                                               ahead},
                   per_group);
      } else {
        std::fill(sums.begin(), sums.end(), Sum(0));
        for (int64_t e = t * J; e < (t + 1) * J; ++e) {
          if (e + ahead < M && has_row(rows, ids[e + ahead]))
            prefetch_row(table + ids[e + ahead] * W, W * sizeof(Row));
          if (!has_row(rows, ids[e])) continue;
          for (int64_t c = 0; c < C; ++c)
            add_scaled(sums.data() + bins[e] * W + c * per_group, table + ids[e] * W + c * per_group,
                       static_cast<Sum>(widen(coef[e * C + c])), per_group);
        }
      }
      for (int64_t i = 0; i < B * W; ++i) out[t * B * W + i] = narrow<Row>(sums[i]);
    }
  }
}

}  // namespace

extern "C" void megamem_gather_sum(int64_t types, const void* table, const int32_t* ids, const void* coef,
                                   const int32_t* bins, void* out, int64_t T, int64_t J, int64_t C, int64_t W,
                                   int64_t B, int64_t rows, int64_t threads) {
  dispatch(types, [&](auto row, auto operand) {
    gather_sum<decltype(row), decltype(operand)>(table, ids, coef, bins, out, T, J, C, W, B, rows, threads);
  });
}
