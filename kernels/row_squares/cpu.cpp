// row_squares in C++: one pass over the gradient. Legend: N rows, W columns.

#include "../common/rows.h"

namespace {

constexpr int64_t kSums = 32;

template <class Row>
void row_squares(const Row* gradient, float* squares, int64_t N, int64_t W, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, N))
  for (int64_t i = 0; i < N; ++i) {
    const Row* row = gradient + i * W;
    float sums[kSums] = {};
    int64_t first = 0;
    for (; first + kSums <= W; first += kSums)
      for (int64_t s = 0; s < kSums; ++s) sums[s] += widen(row[first + s]) * widen(row[first + s]);
    for (int64_t s = 0; first + s < W; ++s) sums[s] += widen(row[first + s]) * widen(row[first + s]);
    for (int64_t half = kSums / 2; half > 0; half /= 2)
      for (int64_t s = 0; s < half; ++s) sums[s] += sums[s + half];
    squares[i] = sums[0];
  }
}

}  // namespace

extern "C" void megamem_row_squares(int64_t types, const void* gradient, float* squares, int64_t N, int64_t W,
                                    int64_t threads) {
  if (types == 1)
    row_squares(static_cast<const bf16*>(gradient), squares, N, W, threads);
  else
    row_squares(static_cast<const float*>(gradient), squares, N, W, threads);
}
