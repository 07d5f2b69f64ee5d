// gather_dot in C++: the products of a token's rows with its vector.

#include "../common/rows.h"

namespace {

// Two sets of partial sums per product, whatever the machine's vectors are: its bits are the same on all machines.
constexpr int64_t kPartials = 16, kVectors = kPartials / kLanes;

template <class Row, class Sum>
inline Sum dot(const Row* row, const Sum* x, int64_t n) {
  lanes<Sum> even[kVectors] = {}, odd[kVectors] = {};
  int64_t i = 0;
  for (; i + 2 * kPartials <= n; i += 2 * kPartials)
    for (int64_t v = 0; v < kVectors; ++v) {
      const int64_t at = i + v * kLanes;
      even[v] += load(row + at) * load(x + at);
      odd[v] += load(row + at + kPartials) * load(x + at + kPartials);
    }
  for (int64_t v = 0; v < kVectors; ++v) even[v] += odd[v];
  if (i + kPartials <= n) {
    for (int64_t v = 0; v < kVectors; ++v) even[v] += load(row + i + v * kLanes) * load(x + i + v * kLanes);
    i += kPartials;
  }
  Sum partial[kPartials];
  std::memcpy(partial, even, sizeof partial);
  int64_t l = 0;
  for (; i + kFewLanes <= n; i += kFewLanes, l += kFewLanes) {
    const lanes<Sum, kFewLanes> few = load<kFewLanes>(partial + l) + load<kFewLanes>(row + i) * load<kFewLanes>(x + i);
    std::memcpy(partial + l, &few, sizeof few);
  }
  for (; i < n; ++i, ++l) partial[l] += widen(row[i]) * x[i];
  for (int64_t half = kPartials / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) partial[l] += partial[l + half];
  return partial[0];
}

// out[t, j, c] = <table[ids[t, j], group c], x[t, bins[t, j], group c]>
template <class Row, class Operand>
void gather_dot(const void* table_at, const int32_t* ids, const void* x_at, const int32_t* bins, void* out_at,
                int64_t T, int64_t J, int64_t C, int64_t W, int64_t B, int64_t rows, int64_t threads) {
  using Sum = typename sum_of<Row>::type;
  const Row* table = static_cast<const Row*>(table_at);
  const Operand* x = static_cast<const Operand*>(x_at);
  Operand* out = static_cast<Operand*>(out_at);
  const int64_t per_group = W / C, M = T * J, ahead = rows_ahead(W * sizeof(Row));
#pragma omp parallel num_threads(threads_for(threads, T))
  {
    std::vector<Sum> vectors(B * W);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < B * W; ++i) vectors[i] = widen(x[t * B * W + i]);
      for (int64_t e = t * J; e < (t + 1) * J; ++e) {
        if (e + ahead < M && has_row(rows, ids[e + ahead]))
          prefetch_row(table + ids[e + ahead] * W, W * sizeof(Row));
        if (!has_row(rows, ids[e])) {
          std::fill_n(out + e * C, C, narrow<Operand>(Sum(0)));
          continue;
        }
        const Sum* vector = vectors.data() + (bins == nullptr ? 0 : bins[e] * W);
        for (int64_t c = 0; c < C; ++c)
          out[e * C + c] = narrow<Operand>(dot(table + ids[e] * W + c * per_group, vector + c * per_group, per_group));
      }
    }
  }
}

}  // namespace

extern "C" void megamem_gather_dot(int64_t types, const void* table, const int32_t* ids, const void* x,
                                   const int32_t* bins, void* out, int64_t T, int64_t J, int64_t C, int64_t W,
                                   int64_t B, int64_t rows, int64_t threads) {
  dispatch(types, [&](auto row, auto operand) {
    gather_dot<decltype(row), decltype(operand)>(table, ids, x, bins, out, T, J, C, W, B, rows, threads);
  });
}
