// tucker_scores in C++, and its gradients: one list at a time, whose scores stay in the cache of a core.
//
// Legend: L lists (a token and head each), H heads, N keys per side, R Tucker rank, C cores, K kept entries of a list.
//
// Every product and every sum is rounded, in an order that depends neither on threads nor on the width of vectors.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Lists whose shares of the cores' gradients are summed by one thread, whatever the number of threads.
constexpr int64_t kListsPerPart = 64;
// Partial sums of a list's share, for vectors.
constexpr int64_t kPartials = 16;

struct Sizes {
  // Elements from one side, token, head and r to the next; keys are next to one another.
  int64_t stride_side, stride_t, stride_h, stride_r;
  int64_t L, H, N, R, C, K;

  int64_t list(int64_t side, int64_t l) const { return side * stride_side + l / H * stride_t + l % H * stride_h; }
};

// The scores of a list's kept entries, in vectors over the entries.
template <class Score>
struct Kept {
  Sizes sizes;
  const Score *scores, *cores;
  const int64_t* ids;
  // [2, R, K] scores of both sides, and one vector more.
  std::vector<Score> of_side[2];

  Kept(Sizes sizes, const void* scores, const void* cores, const int64_t* ids)
      : sizes(sizes), scores(static_cast<const Score*>(scores)), cores(static_cast<const Score*>(cores)), ids(ids) {
    for (auto& each : of_side) each.resize(sizes.R * sizes.K);
  }

  const int64_t* ids_of(int64_t side, int64_t l) const { return ids + (side * sizes.L + l) * sizes.K; }
  const Score* side(int64_t side, int64_t r) const { return of_side[side].data() + r * sizes.K; }
  Score core(int64_t c, int64_t l, int64_t r, int64_t s) const {
    return cores[((c * sizes.H + l % sizes.H) * sizes.R + r) * sizes.R + s];
  }

  void gather(int64_t l) {
    for (int64_t which = 0; which < 2; ++which) {
      const Score* list = scores + sizes.list(which, l);
      const int64_t* chosen = ids_of(which, l);
      for (int64_t r = 0; r < sizes.R; ++r) {
        Score* to = of_side[which].data() + r * sizes.K;
        for (int64_t k = 0; k < sizes.K; ++k) to[k] = list[r * sizes.stride_r + chosen[k]];
      }
    }
  }
};

template <class Score>
inline void scale_into(Score* out, const Score* vector, Score factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = factor * vector[i];
}
template <class Score>
inline void add_scaled(Score* out, const Score* vector, Score factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += factor * vector[i];
}
template <class Score>
inline void multiply_into(Score* out, const Score* a, const Score* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}
template <class Score>
inline void add_product(Score* out, const Score* a, const Score* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += a[i] * b[i];
}

// out[l, k, c] = sum_s (sum_r row[r] core[c, r, s]) column[s]
template <class Score>
void tucker_scores(Sizes sizes, const void* scores, const void* cores, const int64_t* ids, void* out_at,
                   int64_t threads) {
  Score* out = static_cast<Score*>(out_at);
  const int64_t L = sizes.L, R = sizes.R, C = sizes.C, K = sizes.K;
#pragma omp parallel num_threads(threads)
  {
    Kept<Score> kept(sizes, scores, cores, ids);
    std::vector<Score> mixed(K), sum(K);
#pragma omp for schedule(static)
    for (int64_t l = 0; l < L; ++l) {
      kept.gather(l);
      for (int64_t c = 0; c < C; ++c) {
        for (int64_t s = 0; s < R; ++s) {
          scale_into(mixed.data(), kept.side(0, 0), kept.core(c, l, 0, s), K);
          for (int64_t r = 1; r < R; ++r) add_scaled(mixed.data(), kept.side(0, r), kept.core(c, l, r, s), K);
          const auto join = s == 0 ? multiply_into<Score> : add_product<Score>;
          join(sum.data(), mixed.data(), kept.side(1, s), K);
        }
        for (int64_t k = 0; k < K; ++k) out[(l * K + k) * C + c] = sum[k];
      }
    }
  }
}

// A sum of products of three vectors, in kPartials sums that are added up in pairs.
template <class Score>
inline Score sum_of_products(const Score* a, const Score* b, const Score* c, int64_t n) {
  Score partial[kPartials] = {};
  int64_t i = 0;
  for (; i + kPartials <= n; i += kPartials)
    for (int64_t p = 0; p < kPartials; ++p) partial[p] += a[i + p] * b[i + p] * c[i + p];
  for (int64_t p = 0; i + p < n; ++p) partial[p] += a[i + p] * b[i + p] * c[i + p];
  for (int64_t half = kPartials / 2; half > 0; half /= 2)
    for (int64_t p = 0; p < half; ++p) partial[p] += partial[p + half];
  return partial[0];
}

// Gradients of scores, strided as these are, and of cores, of each part of kListsPerPart lists: [parts, C, H, R, R].
template <class Score>
void gradients(Sizes sizes, const void* scores, const void* cores, const int64_t* ids, const void* grad_out_at,
               void* grad_scores_at, void* grad_cores_at, int64_t threads) {
  const Score* grad_out = static_cast<const Score*>(grad_out_at);
  Score* grad_scores = static_cast<Score*>(grad_scores_at);
  Score* grad_cores = static_cast<Score*>(grad_cores_at);
  const int64_t L = sizes.L, H = sizes.H, N = sizes.N, R = sizes.R, C = sizes.C, K = sizes.K;
  const int64_t num_parts = (L + kListsPerPart - 1) / kListsPerPart;
#pragma omp parallel num_threads(threads)
  {
    Kept<Score> kept(sizes, scores, cores, ids);
    // Of the cores' scores, [C, K]; of each side's kept ones, [R, K]; of one product, [K].
    std::vector<Score> of_cores(C * K), of_side[2] = {std::vector<Score>(R * K), std::vector<Score>(R * K)}, mixed(K);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < num_parts; ++part) {
      Score* of_part = grad_cores + part * C * H * R * R;
      std::fill(of_part, of_part + C * H * R * R, Score(0));
      for (int64_t l = part * kListsPerPart; l < std::min(L, (part + 1) * kListsPerPart); ++l) {
        kept.gather(l);
        for (int64_t c = 0; c < C; ++c)
          for (int64_t k = 0; k < K; ++k) of_cores[c * K + k] = grad_out[(l * K + k) * C + c];
        for (auto& each : of_side) std::fill(each.begin(), each.end(), Score(0));
        for (int64_t r = 0; r < R; ++r)
          for (int64_t s = 0; s < R; ++s) {
            scale_into(mixed.data(), of_cores.data(), kept.core(0, l, r, s), K);
            for (int64_t c = 1; c < C; ++c) add_scaled(mixed.data(), of_cores.data() + c * K, kept.core(c, l, r, s), K);
            add_product(of_side[0].data() + r * K, mixed.data(), kept.side(1, s), K);
            add_product(of_side[1].data() + s * K, mixed.data(), kept.side(0, r), K);
            for (int64_t c = 0; c < C; ++c)
              of_part[((c * H + l % H) * R + r) * R + s] +=
                  sum_of_products(of_cores.data() + c * K, kept.side(0, r), kept.side(1, s), K);
          }
        for (int64_t side = 0; side < 2; ++side) {
          const int64_t* chosen = kept.ids_of(side, l);
          for (int64_t r = 0; r < R; ++r) {
            Score* list = grad_scores + sizes.list(side, l) + r * sizes.stride_r;
            const Score* add = of_side[side].data() + r * K;
            std::fill(list, list + N, Score(0));
            for (int64_t k = 0; k < K; ++k) list[chosen[k]] += add[k];
          }
        }
      }
    }
  }
}

}  // namespace

extern "C" void megamem_tucker_scores(int64_t is_double, const void* scores, const void* cores, const int64_t* ids,
                                      void* out, int64_t stride_side, int64_t stride_t, int64_t stride_h,
                                      int64_t stride_r, int64_t L, int64_t H, int64_t N, int64_t R, int64_t C,
                                      int64_t K, int64_t threads) {
  const auto run = is_double ? tucker_scores<double> : tucker_scores<float>;
  run({stride_side, stride_t, stride_h, stride_r, L, H, N, R, C, K}, scores, cores, ids, out, threads);
}

extern "C" void megamem_tucker_scores_gradients(int64_t is_double, const void* scores, const void* cores,
                                                const int64_t* ids, const void* grad_out, void* grad_scores,
                                                void* grad_cores, int64_t stride_side, int64_t stride_t,
                                                int64_t stride_h, int64_t stride_r, int64_t L, int64_t H, int64_t N,
                                                int64_t R, int64_t C, int64_t K, int64_t threads) {
  const auto run = is_double ? gradients<double> : gradients<float>;
  run({stride_side, stride_t, stride_h, stride_r, L, H, N, R, C, K}, scores, cores, ids, grad_out, grad_scores,
      grad_cores, threads);
}
