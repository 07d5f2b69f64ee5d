// row_update in C++: one pass over the rows that move. Legend: R rows of a table, N rows of a gradient, W columns.

#include "../common/rounding.h"
#include "../common/rows.h"

namespace {

inline void update_row(float* row, const float* gradient, float factor, float keep, int64_t W, uint32_t, const Rounding&) {
  for (int64_t d = 0; d < W; ++d) row[d] = keep * row[d] + factor * gradient[d];
}
inline void update_row(float* row, const bf16* gradient, float factor, float keep, int64_t W, uint32_t, const Rounding&) {
  for (int64_t d = 0; d < W; ++d) row[d] = keep * row[d] + factor * widen(gradient[d]);
}
template <class Operand>
inline void update_row(bf16* row, const Operand* gradient, float factor, float keep, int64_t W, uint32_t of_row,
                       const Rounding& rounding) {
  for (int64_t d = 0; d < W; ++d)
    row[d] = rounding.round(keep * widen(row[d]) + factor * widen(gradient[d]), of_row, d);
}

template <class Row, class Operand>
void row_update(Row* weights, const Operand* gradient, const float* factors, const int64_t* rows, const int64_t* numbers,
                int64_t N, int64_t W, float keep, const Rounding& rounding, int64_t threads) {
  const auto moves = [&](int64_t i) { return factors[i] != 0 || (keep != 1 && rows == nullptr); };
  const auto row_of = [&](int64_t i) { return rows == nullptr ? i : rows[i]; };
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, N))
  for (int64_t i = 0; i < N; ++i) {
    if (i + kAhead < N && moves(i + kAhead)) prefetch_row(weights + row_of(i + kAhead) * W, W * sizeof(Row));
    if (!moves(i)) continue;
    const uint32_t of_row = rounding.of_row(numbers == nullptr ? i : numbers[i]);
    update_row(weights + row_of(i) * W, gradient + i * W, factors[i], keep, W, of_row, rounding);
  }
}

}  // namespace

extern "C" void megamem_row_update(int64_t types, void* weights, const void* gradient, const float* factors,
                                   const int64_t* rows, const int64_t* numbers, int64_t N, int64_t W, int64_t keep_bits,
                                   int64_t key, int64_t first_row, int64_t first_column, int64_t threads) {
  const uint32_t bits = static_cast<uint32_t>(keep_bits);
  float keep;
  std::memcpy(&keep, &bits, sizeof keep);
  const Rounding rounding{key, first_row, first_column};
  switch (types) {
    case 0:
      return row_update(static_cast<float*>(weights), static_cast<const float*>(gradient), factors, rows, numbers, N, W,
                        keep, rounding, threads);
    case 1:
      return row_update(static_cast<bf16*>(weights), static_cast<const bf16*>(gradient), factors, rows, numbers, N, W,
                        keep, rounding, threads);
    case 2:
      return row_update(static_cast<float*>(weights), static_cast<const bf16*>(gradient), factors, rows, numbers, N, W,
                        keep, rounding, threads);
    case 3:
      return row_update(static_cast<bf16*>(weights), static_cast<const float*>(gradient), factors, rows, numbers, N, W,
                        keep, rounding, threads);
  }
}
