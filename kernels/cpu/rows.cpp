// The memory kernels on CPU: two gathers and a scatter over table rows, at the speed of memory.
//
// Legend: R table rows, T tokens, J rows read per token, M = T J entries, C column groups, W columns (C divides W), B blocks of entries.
// Entry e is row ids[e] for token e / J, coefficients coef[e C .. e C + C), block block[e] (0 where block is null).
//
// A plain C interface: no header of PyTorch, so it compiles in seconds and serves every version of it. Every element is summed by one
// thread in the order of the entries, and no multiply-add is fused that would round otherwise (-ffp-contract=off): the bits depend neither on
// the number of threads nor on the width of the machine's vectors.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};

inline float widen(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

template <class To, class From>
inline To narrow(From value) {
  return static_cast<To>(value);
}
template <>
inline bf16 narrow<bf16, float>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // To nearest, ties to even; a NaN keeps a bit of its mantissa.
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return bf16{static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded)};
}

// Sums of fp64 are in fp64, all others in fp32.
template <class T>
struct sum_of {
  using type = float;
};
template <>
struct sum_of<double> {
  using type = double;
};

constexpr int64_t kCacheLine = 64;
// Entries between asking for a row and using it: a row takes about 10 ns, an access to memory that misses the TLB too 100 to 200. Rows that are
// written come in the order of their pages, take longer, and have to leave the cache again.
constexpr int64_t kAhead = 24, kAheadOfWrites = 6;

// Asks for a row, in the second level of cache: more lines can be on their way there than to the first.
// Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the calls.
__attribute__((always_inline)) inline void prefetch_row(const void* row, int64_t bytes) {
  const char* first = static_cast<const char*>(row);
  for (int64_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(first + at, 0, 2);
  // Rows begin anywhere in a line.
  __builtin_prefetch(first + bytes - 1, 0, 2);
}

// Sixteen elements at a time, whatever the machine's vectors are, and eight where there are fewer.
constexpr int64_t kLanes = 16, kFewLanes = 8;
template <class Sum, int64_t kWidth>
struct lanes_of {
  typedef Sum type __attribute__((vector_size(kWidth * sizeof(Sum))));
};
template <class Sum, int64_t kWidth = kLanes>
using lanes = typename lanes_of<Sum, kWidth>::type;

template <int64_t kWidth = kLanes, class Sum, class = std::enable_if_t<std::is_floating_point_v<Sum>>>
inline lanes<Sum, kWidth> load(const Sum* from) {
  lanes<Sum, kWidth> out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
template <int64_t kWidth = kLanes>
inline lanes<float, kWidth> load(const bf16* from) {
#ifdef __AVX512F__
  // GCC takes five instructions for the conversion below, and rows in the cache then wait for them.
  if constexpr (kWidth == kLanes)
    return reinterpret_cast<lanes<float>>(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16));
#endif
  lanes<uint16_t, kWidth> bits;
  std::memcpy(&bits, from, sizeof bits);
  return reinterpret_cast<lanes<float, kWidth>>(__builtin_convertvector(bits, lanes<uint32_t, kWidth>) << 16);
}

template <int64_t kWidth, class Row, class Sum>
inline void add_scaled_lanes(Sum* out, const Row* row, Sum scale) {
  const lanes<Sum, kWidth> sum = load<kWidth>(out) + scale * load<kWidth>(row);
  std::memcpy(out, &sum, sizeof sum);
}

template <class Row, class Sum>
inline void add_scaled(Sum* out, const Row* row, Sum scale, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add_scaled_lanes<kLanes>(out + i, row + i, scale);
  for (; i + kFewLanes <= n; i += kFewLanes) add_scaled_lanes<kFewLanes>(out + i, row + i, scale);
  for (; i < n; ++i) out[i] += scale * widen(row[i]);
}

// A token's rows of one column group: J ids and coefficients, of which `last_id` is the last of the whole list of ids.
template <class Row, class Operand>
struct Reads {
  const Row* table;
  const int64_t* ids;
  const int64_t* last_id;
  const Operand* coef;
  int64_t J, C, W;

  const Row* row(int64_t j) const { return table + ids[j] * W; }
  // The row that is read kAhead entries later; the last one, where the list ends before.
  const Row* later_row(int64_t j) const { return table + *std::min(ids + j + kAhead, last_id) * W; }
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
#ifdef __AVX512F__
    sum = reinterpret_cast<lanes<float>>(_mm512_fmadd_ps(_mm512_set1_ps(widen(scale)), reinterpret_cast<__m512>(columns),
                                                         reinterpret_cast<__m512>(sum)));
#else
    sum += widen(scale) * columns;
#endif
  }
};

// Vectors of sums that stay in registers: half of AVX-512's 32, or all that fit into others' 16 of half the width.
#ifdef __AVX512F__
constexpr int64_t kMostVectors = 16;
#else
constexpr int64_t kMostVectors = 6;
#endif

// The weighted sum of kCount x Unit::kColumns columns from `first` on. The last of them end with column n at the latest: they may be some of
// the columns before, whose sums are then made twice.
template <class Unit, int64_t kCount, class Row, class Operand, class Sum>
inline void sum_in_registers(Sum* out, const Reads<Row, Operand>& reads, int64_t first, int64_t n) {
  constexpr int64_t kColumns = Unit::kColumns, kBytes = kCount * kColumns * sizeof(Row);
  const int64_t last = std::min((kCount - 1) * kColumns, n - first - kColumns);
  Unit sums[kCount];
  for (int64_t j = 0; j < reads.J; ++j) {
    const Row* row = reads.row(j) + first;
    prefetch_row(reads.later_row(j) + first, kBytes);
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

// Columns [0, n) of a token's weighted sum in `kMost` x Unit::kColumns columns per pass over its rows; n is at least Unit::kColumns.
template <class Unit, int64_t kMost, class Row, class Operand, class Sum>
inline void sum_in_passes(Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  for (int64_t first = 0; first < n; first += kMost * Unit::kColumns) {
    const int64_t count = std::min(kMost, (n - first + Unit::kColumns - 1) / Unit::kColumns);
    sum_some<Unit, kMost>(count, out, reads, first, n);
  }
}

// Columns [0, n) of a token's weighted sum, all in one block of entries.
template <class Row, class Operand, class Sum>
inline void sum_columns(Sum* out, const Reads<Row, Operand>& reads, int64_t n) {
  using Wide = Sums<Row>;
  using Narrow = Sums<Row, kFewLanes>;
  if (n >= Wide::kColumns) return sum_in_passes<Wide, kMostVectors / Wide::kRegisters>(out, reads, n);
  if (n >= Narrow::kColumns) return sum_in_passes<Narrow, Wide::kColumns / Narrow::kColumns>(out, reads, n);
  std::fill(out, out + n, Sum(0));
  for (int64_t j = 0; j < reads.J; ++j) {
    prefetch_row(reads.later_row(j), n * sizeof(Row));
    add_scaled(out, reads.row(j), static_cast<Sum>(widen(reads.coef[j * reads.C])), n);
  }
}

template <class Row, class Sum>
inline Sum dot(const Row* row, const Sum* x, int64_t n) {
  lanes<Sum> even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += load(row + i) * load(x + i);
    odd += load(row + i + kLanes) * load(x + i + kLanes);
  }
  even += odd;
  if (i + kLanes <= n) {
    even += load(row + i) * load(x + i);
    i += kLanes;
  }
  Sum partial[kLanes];
  std::memcpy(partial, &even, sizeof partial);
  int64_t l = 0;
  if (i + kFewLanes <= n) {
    const lanes<Sum, kFewLanes> few = load<kFewLanes>(partial) + load<kFewLanes>(row + i) * load<kFewLanes>(x + i);
    std::memcpy(partial, &few, sizeof few);
    i += kFewLanes;
    l = kFewLanes;
  }
  for (; i < n; ++i, ++l) partial[l] += widen(row[i]) * x[i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) partial[l] += partial[l + half];
  return partial[0];
}

// out[t, b, group c] = sum_{j: block[t, j] = b} coef[t, j, c] table[ids[t, j], group c]
template <class Row, class Operand>
void sum_rows(const void* table_at, const int64_t* ids, const void* coef_at, const int64_t* block, void* out_at, int64_t T, int64_t J,
              int64_t C, int64_t W, int64_t B, int64_t threads) {
  using Sum = typename sum_of<Row>::type;
  const Row* table = static_cast<const Row*>(table_at);
  const Operand* coef = static_cast<const Operand*>(coef_at);
  Row* out = static_cast<Row*>(out_at);
  const int64_t per_group = W / C, M = T * J;
#pragma omp parallel num_threads(threads)
  {
    std::vector<Sum> sums(B * W);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) {
      if (block == nullptr) {
        for (int64_t c = 0; c < C; ++c)
          sum_columns(sums.data() + c * per_group,
                      Reads<Row, Operand>{table + c * per_group, ids + t * J, ids + M - 1, coef + t * J * C + c, J, C, W}, per_group);
      } else {
        std::fill(sums.begin(), sums.end(), Sum(0));
        for (int64_t e = t * J; e < (t + 1) * J; ++e) {
          if (e + kAhead < M) prefetch_row(table + ids[e + kAhead] * W, W * sizeof(Row));
          for (int64_t c = 0; c < C; ++c)
            add_scaled(sums.data() + block[e] * W + c * per_group, table + ids[e] * W + c * per_group,
                       static_cast<Sum>(widen(coef[e * C + c])), per_group);
        }
      }
      for (int64_t i = 0; i < B * W; ++i) out[t * B * W + i] = narrow<Row>(sums[i]);
    }
  }
}

// out[t, j, c] = <table[ids[t, j], group c], x[t, block[t, j], group c]>
template <class Row, class Operand>
void dot_rows(const void* table_at, const int64_t* ids, const void* x_at, const int64_t* block, void* out_at, int64_t T, int64_t J, int64_t C,
              int64_t W, int64_t B, int64_t threads) {
  using Sum = typename sum_of<Row>::type;
  const Row* table = static_cast<const Row*>(table_at);
  const Operand* x = static_cast<const Operand*>(x_at);
  Operand* out = static_cast<Operand*>(out_at);
  const int64_t per_group = W / C, M = T * J;
#pragma omp parallel num_threads(threads)
  {
    std::vector<Sum> vectors(B * W);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < B * W; ++i) vectors[i] = widen(x[t * B * W + i]);
      for (int64_t e = t * J; e < (t + 1) * J; ++e) {
        if (e + kAhead < M) prefetch_row(table + ids[e + kAhead] * W, W * sizeof(Row));
        const Sum* vector = vectors.data() + (block == nullptr ? 0 : block[e] * W);
        for (int64_t c = 0; c < C; ++c)
          out[e * C + c] = narrow<Operand>(dot(table + ids[e] * W + c * per_group, vector + c * per_group, per_group));
      }
    }
  }
}

template <class Row, class Operand, class Sum>
inline void add_product(Row* row, const Operand* vector, Sum scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = narrow<Row>(widen(row[i]) + scale * static_cast<Sum>(widen(vector[i])));
}
template <class Operand, class Sum>
inline void add_product(Sum* row, const Operand* vector, Sum scale, int64_t n) {
  add_scaled(row, vector, scale, n);
}

// Some columns of the entries of one bucket: accumulator[ids[e], first .. last) += coef[e, c] vec[e / J, block[e], first .. last)
template <class Row, class Operand>
void accumulate_bucket(Row* accumulator, const int64_t* ids, const Operand* coef, const Operand* vec, const int64_t* block,
                       const int32_t* order, int64_t count, int64_t first, int64_t last, int64_t J, int64_t C, int64_t W, int64_t B) {
  using Sum = typename sum_of<Row>::type;
  const int64_t per_group = W / C;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAheadOfWrites < count)
      prefetch_row(accumulator + ids[order[i + kAheadOfWrites]] * W + first, (last - first) * sizeof(Row));
    const int64_t e = order[i];
    Row* row = accumulator + ids[e] * W;
    const Operand* vector = vec + (e / J * B + (block == nullptr ? 0 : block[e])) * W;
    for (int64_t c = first / per_group; c * per_group < last; ++c) {
      const Sum scale = widen(coef[e * C + c]);
      const int64_t stop = std::min(last, (c + 1) * per_group);
      const int64_t start = std::max(first, c * per_group);
      add_product(row + start, vector + start, scale, stop - start);
    }
  }
}

struct Task {
  int64_t bucket, first, last;
};

template <class Row, class Operand>
void accumulate(void* accumulator, const int64_t* ids, const void* coef, const void* vec, const int64_t* block, const int32_t* order,
                const int64_t* starts, int64_t num_buckets, int64_t M, int64_t J, int64_t C, int64_t W, int64_t B, int64_t threads) {
  // A bucket of more than its share (hot rows) is split by columns, which changes no sum.
  constexpr int64_t kColumns = 64;
  const int64_t share = M / (4 * threads) + 1;
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
    accumulate_bucket(static_cast<Row*>(accumulator), ids, static_cast<const Operand*>(coef), static_cast<const Operand*>(vec), block,
                      order + start, count, tasks[i].first, tasks[i].last, J, C, W, B);
  }
}

// The pairs of row and operand types; the numbers are those of `_PAIRS` in ops.py.
template <template <class, class> class Function, class... Arguments>
int dispatch(int64_t pair, Arguments... arguments) {
  switch (pair) {
    case 0: Function<float, float>::run(arguments...); return 0;
    case 1: Function<bf16, bf16>::run(arguments...); return 0;
    case 2: Function<float, bf16>::run(arguments...); return 0;
    case 3: Function<bf16, float>::run(arguments...); return 0;
    case 4: Function<double, double>::run(arguments...); return 0;
    default: return 1;
  }
}

#define MEGAMEM_FUNCTION(name)                                  \
  template <class Row, class Operand>                           \
  struct name##_function {                                      \
    template <class... Arguments>                               \
    static void run(Arguments... arguments) {                   \
      name<Row, Operand>(arguments...);                         \
    }                                                           \
  };
MEGAMEM_FUNCTION(sum_rows)
MEGAMEM_FUNCTION(dot_rows)
MEGAMEM_FUNCTION(accumulate)

}  // namespace

extern "C" {

int megamem_sum_rows(int64_t pair, const void* table, const int64_t* ids, const void* coef, const int64_t* block, void* out, int64_t T,
                     int64_t J, int64_t C, int64_t W, int64_t B, int64_t threads) {
  return dispatch<sum_rows_function>(pair, table, ids, coef, block, out, T, J, C, W, B, threads);
}

int megamem_dot_rows(int64_t pair, const void* table, const int64_t* ids, const void* x, const int64_t* block, void* out, int64_t T, int64_t J,
                     int64_t C, int64_t W, int64_t B, int64_t threads) {
  return dispatch<dot_rows_function>(pair, table, ids, x, block, out, T, J, C, W, B, threads);
}

// Entries by bucket, a bucket being the rows that agree but for their low `shift` bits, in the order of the entries within each:
// order [M], and starts [num_buckets + 1], where each bucket's entries begin.
void megamem_bucket_order(const int64_t* ids, int32_t* order, int64_t* starts, int64_t M, int64_t num_buckets, int64_t shift,
                          int64_t threads) {
  // Each thread counts, and later places, a contiguous part of the entries: one after the other within every bucket.
  std::vector<int64_t> next(threads * num_buckets, 0);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int64_t part = 0; part < threads; ++part)
    for (int64_t e = M * part / threads; e < M * (part + 1) / threads; ++e) ++next[part * num_buckets + (ids[e] >> shift)];
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    starts[bucket] = total;
    for (int64_t part = 0; part < threads; ++part) {
      const int64_t count = next[part * num_buckets + bucket];
      next[part * num_buckets + bucket] = total;
      total += count;
    }
  }
  starts[num_buckets] = total;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int64_t part = 0; part < threads; ++part)
    for (int64_t e = M * part / threads; e < M * (part + 1) / threads; ++e)
      order[next[part * num_buckets + (ids[e] >> shift)]++] = static_cast<int32_t>(e);
}

int megamem_accumulate(int64_t pair, void* accumulator, const int64_t* ids, const void* coef, const void* vec, const int64_t* block,
                       const int32_t* order, const int64_t* starts, int64_t num_buckets, int64_t M, int64_t J, int64_t C, int64_t W, int64_t B,
                       int64_t threads) {
  return dispatch<accumulate_function>(pair, accumulator, ids, coef, vec, block, order, starts, num_buckets, M, J, C, W, B, threads);
}
}
