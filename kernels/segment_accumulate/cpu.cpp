// segment_accumulate in C++: entries are put into buckets of neighbouring rows, and every bucket is added up in the
// order of its entries.

#include "../common/rounding.h"
#include "../common/rows.h"

namespace {

// As kAhead: rows that are written come in the order of their pages, take longer, and have to leave the cache again.
constexpr int64_t kAheadOfWrites = 6;

template <class Row, class Operand, class Sum>
inline void add_product(Row* row, const Operand* vector, Sum scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = narrow<Row>(widen(row[i]) + scale * static_cast<Sum>(widen(vector[i])));
}
template <class Operand, class Sum>
inline void add_product(Sum* row, const Operand* vector, Sum scale, int64_t n) {
  add_scaled(row, vector, scale, n);
}

// Columns [first, last) of the entries of one bucket: accumulator[ids[e]] += coef[e, c] vec[e / J, bins[e]]
template <class Row, class Operand>
void accumulate_bucket(Row* accumulator, const int32_t* ids, const Operand* coef, const Operand* vec,
                       const int32_t* bins, const int32_t* order, int64_t count, int64_t first, int64_t last,
                       int64_t J, int64_t C, int64_t W, int64_t B) {
  using Sum = typename sum_of<Row>::type;
  const int64_t per_group = W / C;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAheadOfWrites < count)
      prefetch_row(accumulator + ids[order[i + kAheadOfWrites]] * W + first, (last - first) * sizeof(Row));
    const int64_t e = order[i];
    Row* row = accumulator + ids[e] * W;
    const Operand* vector = vec + (e / J * B + (bins == nullptr ? 0 : bins[e])) * W;
    for (int64_t c = first / per_group; c * per_group < last; ++c) {
      const Sum scale = widen(coef[e * C + c]);
      const int64_t stop = std::min(last, (c + 1) * per_group);
      const int64_t start = std::max(first, c * per_group);
      add_product(row + start, vector + start, scale, stop - start);
    }
  }
}

// The same, of a bf16 accumulator whose rows are added to in fp32 and then rounded, once each: the entries row by row, a
// row's in their order.
template <class Operand>
void accumulate_rounded(bf16* accumulator, const int32_t* ids, const Operand* coef, const Operand* vec,
                        const int32_t* bins, const int32_t* order, int64_t count, int64_t first, int64_t last,
                        int64_t J, int64_t C, int64_t W, int64_t B, const Rounding& rounding) {
  const int64_t per_group = W / C;
  std::vector<int32_t> by_row(order, order + count);
  std::stable_sort(by_row.begin(), by_row.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  std::vector<float> sums(last - first);
  for (int64_t i = 0; i < count;) {
    const int64_t id = ids[by_row[i]];
    bf16* row = accumulator + id * W;
    for (int64_t d = first; d < last; ++d) sums[d - first] = widen(row[d]);
    for (; i < count && ids[by_row[i]] == id; ++i) {
      if (i + kAheadOfWrites < count)
        prefetch_row(accumulator + ids[by_row[i + kAheadOfWrites]] * W + first, (last - first) * sizeof(bf16));
      const int64_t e = by_row[i];
      const Operand* vector = vec + (e / J * B + (bins == nullptr ? 0 : bins[e])) * W;
      for (int64_t c = first / per_group; c * per_group < last; ++c) {
        const int64_t stop = std::min(last, (c + 1) * per_group), start = std::max(first, c * per_group);
        add_scaled(sums.data() + start - first, vector + start, static_cast<float>(widen(coef[e * C + c])), stop - start);
      }
    }
    const uint32_t of_row = rounding.of_row(id);
    for (int64_t d = first; d < last; ++d) row[d] = rounding.round(sums[d - first], of_row, d);
  }
}

struct Task {
  int64_t bucket, first, last;
};

template <class Row, class Operand>
void segment_accumulate(void* accumulator, const int32_t* ids, const void* coef, const void* vec, const int32_t* bins,
                        const int32_t* order, const int64_t* starts, int64_t num_buckets, int64_t J, int64_t C,
                        int64_t W, int64_t B, const Rounding* rounding, int64_t threads) {
  // A bucket of more than its share (hot rows) is split by columns, which changes no sum.
  constexpr int64_t kColumns = 64;
  const int64_t share = starts[num_buckets] / (4 * threads) + 1;
  std::vector<Task> tasks;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    const int64_t count = starts[bucket + 1] - starts[bucket];
    const int64_t step = count > share && threads > 1 ? kColumns : W;
    if (count > 0)
      for (int64_t first = 0; first < W; first += step) tasks.push_back({bucket, first, std::min(W, first + step)});
  }
  const int64_t num_tasks = tasks.size();
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
  for (int64_t i = 0; i < num_tasks; ++i) {
    const int64_t start = starts[tasks[i].bucket], count = starts[tasks[i].bucket + 1] - start;
    const Operand *coefs = static_cast<const Operand*>(coef), *vectors = static_cast<const Operand*>(vec);
    if constexpr (std::is_same_v<Row, bf16>) {
      if (rounding != nullptr) {
        accumulate_rounded(static_cast<bf16*>(accumulator), ids, coefs, vectors, bins, order + start, count,
                           tasks[i].first, tasks[i].last, J, C, W, B, *rounding);
        continue;
      }
    }
    accumulate_bucket(static_cast<Row*>(accumulator), ids, coefs, vectors, bins, order + start, count, tasks[i].first,
                      tasks[i].last, J, C, W, B);
  }
}

}  // namespace

extern "C" void megamem_segment_accumulate(int64_t types, void* accumulator, const int32_t* ids, const void* coef,
                                           const void* vec, const int32_t* bins, const int32_t* order,
                                           const int64_t* starts, int64_t num_buckets, int64_t J, int64_t C,
                                           int64_t W, int64_t B, int64_t is_rounded, int64_t key, int64_t first_row,
                                           int64_t first_column, int64_t threads) {
  const Rounding rounding{key, first_row, first_column};
  dispatch(types, [&](auto row, auto operand) {
    segment_accumulate<decltype(row), decltype(operand)>(accumulator, ids, coef, vec, bins, order, starts, num_buckets,
                                                         J, C, W, B, is_rounded ? &rounding : nullptr, threads);
  });
}

// Entries by bucket, a bucket being the rows that agree but for their low `shift` bits, in the order of the entries
// within each: order [M], and starts [num_buckets + 1], where each bucket's entries begin. Entries whose rows others hold
// are in none: the last of `starts` is the number of the others, behind which nothing of the order is written.
extern "C" void megamem_bucket_order(const int32_t* ids, int32_t* order, int64_t* starts, int64_t M,
                                     int64_t num_buckets, int64_t shift, int64_t rows, int64_t threads) {
  // Each thread counts, and later places, a contiguous run of the entries: one after the other within every bucket.
  std::vector<int64_t> next(threads * num_buckets, 0);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int64_t thread = 0; thread < threads; ++thread)
    for (int64_t e = M * thread / threads; e < M * (thread + 1) / threads; ++e)
      if (has_row(rows, ids[e])) ++next[thread * num_buckets + (ids[e] >> shift)];
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    starts[bucket] = total;
    for (int64_t thread = 0; thread < threads; ++thread) {
      const int64_t count = next[thread * num_buckets + bucket];
      next[thread * num_buckets + bucket] = total;
      total += count;
    }
  }
  starts[num_buckets] = total;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int64_t thread = 0; thread < threads; ++thread)
    for (int64_t e = M * thread / threads; e < M * (thread + 1) / threads; ++e)
      if (has_row(rows, ids[e])) order[next[thread * num_buckets + (ids[e] >> shift)]++] = static_cast<int32_t>(e);
}
