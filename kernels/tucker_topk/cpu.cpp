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
inline void weighted_sum(const Score* scores, int64_t stride_r, const Score* factors, int64_t stride_of_factors,
                         int64_t rank, Score* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = factors[0] * scores[i];
  for (int64_t r = 1; r < rank; ++r)
    for (int64_t i = 0; i < n; ++i) out[i] += factors[r * stride_of_factors] * scores[r * stride_r + i];
}

template <class Score>
struct Selection {
  using Key = key_of<Score>;

  Scores<Score> sides[2];
  // [H, R, R], and [H, R] of each side.
  const Score* core;
  const Score* directions[2];
  int64_t *stage_ids, *retrieved;
  int64_t L, H, N, R, M, K;

  void run(int64_t threads) const {
    // Most models have this rank; loops over a number that the compiler knows are unrolled.
    if (R == 2) return run_with_rank<2>(threads);
    run_with_rank<0>(threads);
  }

 private:
  // Rows of the grid whose keys are grouped by column, row a with row a + num_rows_apart: groups enough for `Best`.
  int64_t num_rows_apart() const { return (Best<Score>::num_groups(K) + M - 1) / M; }

  // Keys [M, M] of the candidates, each row's scores being those of `columns` [R, M] by `mixed` [R, M]; and, with
  // groups, the largest key of each.
  template <int64_t kRank, bool kGroups>
  void grid(const Score* mixed, const Score* columns, Key* keys, Key* largest) const {
    const int64_t rank = kRank ? kRank : R, apart = num_rows_apart();
    for (int64_t a = 0; a < M; ++a) {
      Key* row = keys + a * M;
      Key* group = largest + a % apart * M;
      for (int64_t b = 0; b < M; ++b) {
        Score score = mixed[a] * columns[b];
        for (int64_t s = 1; s < rank; ++s) score += mixed[s * M + a] * columns[s * M + b];
        row[b] = ordered_key(score);
        if (kGroups) group[b] = std::max(group[b], row[b]);
      }
    }
  }

  template <int64_t kRank>
  void run_with_rank(int64_t threads) const {
    const bool with_groups = Best<Score>::has_groups(M * M, K);
    const int64_t num_groups = num_rows_apart() * M;
#pragma omp parallel num_threads(threads)
    {
      Best<Score> best;
      // Scores and their keys, of a list of N or of the grid; the kept rows' scores, mixed by the core.
      std::vector<Score> scores(N), kept[2], mixed(R * M);
      std::vector<Key> keys(std::max(N, M * M)), largest(num_groups);
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
          weighted_sum(list, stride_r, directions[side] + head * R, 1, R, scores.data(), N);
          for (int64_t i = 0; i < N; ++i) keys[i] = ordered_key(scores[i]);
          best(keys.data(), N, M, positions[side].data());
          int64_t* ids = stage_ids + (side * L + l) * M;
          for (int64_t m = 0; m < M; ++m) ids[m] = positions[side][m];
          for (int64_t r = 0; r < R; ++r)
            for (int64_t m = 0; m < M; ++m) kept[side][r * M + m] = list[r * stride_r + positions[side][m]];
        }
        for (int64_t s = 0; s < R; ++s)
          weighted_sum(kept[0].data(), M, core + head * R * R + s, R, R, mixed.data() + s * M, M);
        if (with_groups) {
          std::fill(largest.begin(), largest.end(), Best<Score>::kLeast);
          grid<kRank, true>(mixed.data(), kept[1].data(), keys.data(), largest.data());
          best.of_groups(keys.data(), M * M, largest.data(), num_groups, K, places.data());
        } else {
          grid<kRank, false>(mixed.data(), kept[1].data(), keys.data(), largest.data());
          best(keys.data(), M * M, K, places.data());
        }
        const uint32_t width = M;
        for (int64_t k = 0; k < K; ++k) {
          const uint32_t place = places[k];
          retrieved[l * K + k] = positions[0][place / width];
          retrieved[(L + l) * K + k] = positions[1][place % width];
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
