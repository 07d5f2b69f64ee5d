// ngram_hashes in C++: one pass over tiles of tokens, whose windows stay in cache for all groups.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common/product.h"

namespace {

constexpr int64_t kTile = 256;

struct problem {
  const int64_t *extended, *multipliers, *moduli, *offsets, *orders, *positions;
  int64_t stride_s, stride_b, missing_row, G, K, N, s, b, c, missing_id, boundary_id;
  int64_t* out;
};

// Ids of `size` tokens from `first` on by their distance, [N, kTile], and the tokens' positions.
template <bool kCut>
void read_windows(const problem& of, int64_t first, int64_t size, uint64_t* window, int64_t* places) {
  for (int64_t i = 0, row = first / of.b, column = first % of.b; i < size; ++i) {
    places[i] = of.positions[row * of.stride_s + column * of.stride_b];
    const bool is_last = ++column == of.b;
    row += is_last;
    column = is_last ? 0 : column;
  }
  const int64_t length = of.s / of.c * of.b, halo = (of.N - 1) * of.b;
  // Within a stretch ids of neighbours are neighbours.
  for (int64_t begin = 0, end; begin < size; begin = end) {
    const int64_t stretch = (first + begin) / length;
    const int64_t* own = of.extended + first + (stretch + 1) * halo;
    end = std::min(size, (stretch + 1) * length - first);
    int64_t seen[kTile];
    for (int64_t i = begin; i < end; ++i) {
      window[i] = static_cast<uint64_t>(own[i]);
      seen[i] = -1;
    }
    for (int64_t lag = 1; lag < of.N; ++lag) {
      const int64_t* ids = own - lag * of.b;
      for (int64_t i = begin; i < end; ++i) {
        seen[i] = places[i] >= lag && (!kCut || ids[i] != of.boundary_id) ? seen[i] : 0;
        window[lag * kTile + i] = static_cast<uint64_t>(seen[i] ? ids[i] : of.missing_id);
      }
    }
  }
}

template <bool kXor, bool kCut, bool kMissing>
void ngram_hashes(const problem& of, int64_t threads) {
  const int64_t T = of.s * of.b, num_tiles = (T + kTile - 1) / kTile;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = tile * kTile, size = std::min(kTile, T - first);
    std::vector<uint64_t> window(of.N * kTile);
    uint64_t hashed[kTile];
    int64_t places[kTile];
    read_windows<kCut>(of, first, size, window.data(), places);
    for (int64_t g = 0; g < of.G; ++g) {
      const int64_t order = of.orders[g];
      std::fill(hashed, hashed + size, 0);
      for (int64_t lag = 0; lag < order; ++lag) {
        const uint64_t factor = static_cast<uint64_t>(of.multipliers[g * of.N + lag]);
        const uint64_t* ids = window.data() + lag * kTile;
        for (int64_t i = 0; i < size; ++i) {
          const uint64_t product = ids[i] * factor;
          hashed[i] = kXor ? hashed[i] ^ product : hashed[i] + product;
        }
      }
      for (int64_t k = g * of.K; k < (g + 1) * of.K; ++k) {
        const uint64_t n = static_cast<uint64_t>(of.moduli[k]), offset = static_cast<uint64_t>(of.offsets[k]);
        // With 2^64 / n - e, e in [0, 1], a product's upper half is the quotient of a number below 2^63, or one less.
        const uint64_t reciprocal = ~0ull / n;
        int64_t* out = of.out + k * T + first;
        for (int64_t i = 0; i < size; ++i) {
          // Floor modulo: -1 - h of a negative h leaves n - 1 less its remainder.
          const uint64_t sign = static_cast<uint64_t>(static_cast<int64_t>(hashed[i]) >> 63), h = hashed[i] ^ sign;
          uint64_t rest = h - upper_product(h, reciprocal) * n;
          rest = rest >= n ? rest - n : rest;
          rest = sign ? n - 1 - rest : rest;
          if (kMissing) rest = places[i] < order - 1 ? static_cast<uint64_t>(of.missing_row) : rest;
          out[i] = static_cast<int64_t>(rest + offset);
        }
      }
    }
  }
}

}  // namespace

extern "C" void megamem_ngram_hashes(int64_t is_xor, int64_t cut_at_boundary, int64_t has_missing, int64_t missing_row,
                                     const int64_t* extended, const int64_t* multipliers, const int64_t* moduli,
                                     const int64_t* offsets, const int64_t* orders, const int64_t* missing_id,
                                     const int64_t* boundary_id, const int64_t* positions, int64_t stride_s,
                                     int64_t stride_b, int64_t G, int64_t K, int64_t N, int64_t s, int64_t b,
                                     int64_t c, int64_t* out, int64_t threads) {
  const problem of{extended, multipliers, moduli, offsets, orders, positions, stride_s, stride_b, missing_row,
                   G, K, N, s, b, c, *missing_id, *boundary_id, out};
  using run = void (*)(const problem&, int64_t);
  static constexpr run runs[2][2][2] = {
      {{ngram_hashes<false, false, false>, ngram_hashes<false, false, true>},
       {ngram_hashes<false, true, false>, ngram_hashes<false, true, true>}},
      {{ngram_hashes<true, false, false>, ngram_hashes<true, false, true>},
       {ngram_hashes<true, true, false>, ngram_hashes<true, true, true>}}};
  runs[is_xor != 0][cut_at_boundary != 0][has_missing != 0](of, threads);
}
