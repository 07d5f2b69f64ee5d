// tucker_topk in C++: one list of candidates at a time, whose grid stays in the cache of a core.
//
// Legend: L lists (a token and head each), H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first
// stage, K retrieved.

#include "../common/order.h"

namespace {

// One side's scores [T, H, N, R]; keys are next to one another.
template <class Score>
struct Scores {
  const Score* first;
  int64_t stride_t, stride_h, stride_r;

  const Score* list(int64_t token, int64_t head) const { return first + token * stride_t + head * stride_h; }
};

// sum_r factors[r] scores[r][n] of all n, each product and sum rounded, in the order of r.
template <class Score>
inline void weighted_sum(const Score* scores, int64_t stride_r, const Score* factors, int64_t rank, Score* out,
                         int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = factors[0] * scores[i];
  for (int64_t r = 1; r < rank; ++r)
    for (int64_t i = 0; i < n; ++i) out[i] += factors[r] * scores[r * stride_r + i];
}

template <class Score>
struct Selection {
  Scores<Score> sides[2];
  // [H, R, R], and [H, R] of each side.
  const Score* core;
  const Score* directions[2];
  int64_t *stage_ids, *retrieved;
  int64_t L, H, N, R, M, K;

  void run(int64_t threads) const {
#pragma omp parallel num_threads(threads)
    {
      Best<Score> best;
      // Scores and their keys, of a list of N or of a row of the grid; the keys of the grid.
      std::vector<Score> scores(std::max(N, M)), kept[2], mixed(R);
      std::vector<key_of<Score>> keys(std::max(N, M * M));
      std::vector<int32_t> positions[2], places(K);
      for (int side = 0; side < 2; ++side) {
        kept[side].resize(R * M);
        positions[side].resize(M);
      }
#pragma omp for schedule(static)
      for (int64_t l = 0; l < L; ++l) {
        const int64_t token = l / H, head = l % H;
        for (int side = 0; side < 2; ++side) {
          const Score* list = sides[side].list(token, head);
          const int64_t stride_r = sides[side].stride_r;
          weighted_sum(list, stride_r, directions[side] + head * R, R, scores.data(), N);
          for (int64_t i = 0; i < N; ++i) keys[i] = ordered_key(scores[i]);
          best(keys.data(), N, M, positions[side].data());
          int64_t* ids = stage_ids + (side * L + l) * M;
          for (int64_t m = 0; m < M; ++m) {
            ids[m] = positions[side][m];
            for (int64_t r = 0; r < R; ++r) kept[side][r * M + m] = list[r * stride_r + ids[m]];
          }
        }
        for (int64_t a = 0; a < M; ++a) {
          for (int64_t s = 0; s < R; ++s) {
            const Score* to = core + head * R * R + s;
            mixed[s] = kept[0][a] * to[0];
            for (int64_t r = 1; r < R; ++r) mixed[s] += kept[0][r * M + a] * to[r * R];
          }
          weighted_sum(kept[1].data(), M, mixed.data(), R, scores.data(), M);
          for (int64_t b = 0; b < M; ++b) keys[a * M + b] = ordered_key(scores[b]);
        }
        best(keys.data(), M * M, K, places.data());
        for (int64_t k = 0; k < K; ++k) {
          retrieved[l * K + k] = positions[0][places[k] / M];
          retrieved[(L + l) * K + k] = positions[1][places[k] % M];
        }
      }
    }
  }
};

template <class Score>
void select(const void* rows, const void* columns, const void* core, const void* u, const void* v, int64_t* stage_ids,
            int64_t* retrieved, const int64_t* strides, int64_t L, int64_t H, int64_t N, int64_t R, int64_t M,
            int64_t K, int64_t threads) {
  const auto of = [](const void* tensor) { return static_cast<const Score*>(tensor); };
  Selection<Score>{{{of(rows), strides[0], strides[1], strides[2]}, {of(columns), strides[3], strides[4], strides[5]}},
                   of(core), {of(u), of(v)}, stage_ids, retrieved, L, H, N, R, M, K}
      .run(threads);
}

}  // namespace

extern "C" void megamem_tucker_topk(int64_t is_double, const void* rows, const void* columns, const void* core,
                                    const void* u, const void* v, int64_t* stage_ids, int64_t* retrieved, int64_t row_t,
                                    int64_t row_h, int64_t row_r, int64_t column_t, int64_t column_h, int64_t column_r,
                                    int64_t L, int64_t H, int64_t N, int64_t R, int64_t M, int64_t K, int64_t threads) {
  const int64_t strides[] = {row_t, row_h, row_r, column_t, column_h, column_r};
  const auto run = is_double ? select<double> : select<float>;
  run(rows, columns, core, u, v, stage_ids, retrieved, strides, L, H, N, R, M, K, threads);
}
