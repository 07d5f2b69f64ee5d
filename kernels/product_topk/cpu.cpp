// product_topk in C++: the candidates that can be among the best (README.md), of one token and head at a time.
//
// Legend: L lists (a token and head each), H heads, N keys per side, M rows (and columns) kept by the first stage, K
// retrieved, Q candidates.

#include "../common/order.h"

namespace {

template <class Score>
struct Selection {
  // [T, H, N] each; keys are next to one another.
  const Score* sides[2];
  int64_t stride_t[2], stride_h[2];
  int64_t *stage_ids, *retrieved;
  int64_t L, H, N, M, K;

  // Columns b of a row a with (a + 1)(b + 1) <= K.
  int64_t num_columns(int64_t a) const { return std::min(M, K / (a + 1)); }

  void run(int64_t threads) const {
    std::vector<int32_t> candidates;
    for (int64_t a = 0; a < M; ++a)
      for (int64_t b = 0; b < num_columns(a); ++b) candidates.push_back(a * M + b);
    const int64_t Q = candidates.size();
#pragma omp parallel num_threads(threads)
    {
      Best<Score> best;
      std::vector<Score> kept[2];
      std::vector<key_of<Score>> keys(std::max(N, Q));
      std::vector<int32_t> positions[2], places(K);
      for (int side = 0; side < 2; ++side) {
        kept[side].resize(M);
        positions[side].resize(M);
      }
#pragma omp for schedule(static)
      for (int64_t l = 0; l < L; ++l) {
        for (int side = 0; side < 2; ++side) {
          const Score* list = sides[side] + l / H * stride_t[side] + l % H * stride_h[side];
          for (int64_t i = 0; i < N; ++i) keys[i] = ordered_key(list[i]);
          best(keys.data(), N, M, positions[side].data());
          int64_t* ids = stage_ids + (side * L + l) * M;
          for (int64_t m = 0; m < M; ++m) {
            ids[m] = positions[side][m];
            kept[side][m] = list[ids[m]];
          }
        }
        key_of<Score>* row = keys.data();
        for (int64_t a = 0; a < M; row += num_columns(a), ++a)
          for (int64_t b = 0; b < num_columns(a); ++b) row[b] = ordered_key(kept[0][a] + kept[1][b]);
        best(keys.data(), Q, K, places.data());
        for (int64_t k = 0; k < K; ++k) {
          const int32_t candidate = candidates[places[k]];
          retrieved[l * K + k] = positions[0][candidate / M];
          retrieved[(L + l) * K + k] = positions[1][candidate % M];
        }
      }
    }
  }
};

template <class Score>
void select(const void* rows, const void* columns, int64_t* stage_ids, int64_t* retrieved, const int64_t* strides,
            int64_t L, int64_t H, int64_t N, int64_t M, int64_t K, int64_t threads) {
  Selection<Score>{{static_cast<const Score*>(rows), static_cast<const Score*>(columns)},
                   {strides[0], strides[2]}, {strides[1], strides[3]}, stage_ids, retrieved, L, H, N, M, K}
      .run(threads);
}

}  // namespace

extern "C" void megamem_product_topk(int64_t is_double, const void* rows, const void* columns, int64_t* stage_ids,
                                     int64_t* retrieved, int64_t row_t, int64_t row_h, int64_t column_t,
                                     int64_t column_h, int64_t L, int64_t H, int64_t N, int64_t M, int64_t K,
                                     int64_t threads) {
  const int64_t strides[] = {row_t, row_h, column_t, column_h};
  const auto run = is_double ? select<double> : select<float>;
  run(rows, columns, stage_ids, retrieved, strides, L, H, N, M, K, threads);
}
