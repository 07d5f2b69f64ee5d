// What the memory kernels in C++ have in common: the types of rows and operands, vectors of sums, and asking for rows
// ahead of time.
//
// Legend: T tokens, J rows read per token, M = T J entries, C column groups, W columns (C divides W), B bins.
// Entry e is row ids[e] for token e / J, coefficients coef[e C .. e C + C), bins bins[e] (0 where bins is null). An id
// outside [0, rows) is of a row that others hold: its entry is passed over.
//
// A plain C interface: no header of PyTorch, so it compiles in seconds and serves every version of it. Every element is
// summed by one thread in the order of the entries, and no multiply-add is fused that would round otherwise
// (-ffp-contract=off): the bits depend neither on the number of threads nor on the width of the machine's vectors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
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

// Tells whether a table of so many rows has the row: one comparison, as a negative id is a large number without a sign.
inline bool has_row(int64_t rows, int32_t id) { return static_cast<uint32_t>(id) < rows; }

constexpr int64_t kCacheLine = 64;
// Entries between asking for a row and using it: a short row takes about 10 ns, an access to memory that misses the TLB
// too 100 to 200.
constexpr int64_t kAhead = 24;
// Bytes on their way are bounded as well, by the lines that a core can wait for: longer rows are asked for later, as each
// takes longer. Rows of 384 bytes are read 12 % faster 12 ahead than 24, on a core with AVX2.
constexpr int64_t kBytesAhead = 4608;
inline int64_t rows_ahead(int64_t row_bytes) {
  return std::max<int64_t>(kAhead / 3, std::min(kAhead, kBytesAhead / std::max<int64_t>(1, row_bytes)));
}

// Asks for a row, in the second level of cache: more lines can be on their way there than to the first.
// Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the calls.
__attribute__((always_inline)) inline void prefetch_row(const void* row, int64_t bytes) {
  const char* first = static_cast<const char*>(row);
  for (int64_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(first + at, 0, 2);
  // Rows begin anywhere in a line.
  __builtin_prefetch(first + bytes - 1, 0, 2);
}

// Elements at a time: as many of fp32 as a register of this machine holds, and half as many where there are fewer. A
// vector of more than a register has no place but memory: GCC would load and store a sum at every addition to it.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kFewLanes = kLanes / 2;
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
// GCC takes five instructions for the conversion below, and rows in the cache then wait for them.
#if defined(__AVX512F__)
  if constexpr (kWidth == 16)
    return reinterpret_cast<lanes<float>>(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16));
#endif
#if defined(__AVX2__)
  if constexpr (kWidth == 8)
    return reinterpret_cast<lanes<float, kWidth>>(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
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

// Threads for T tokens: waking one that has no token costs more than the rows of the only one.
inline int64_t threads_for(int64_t threads, int64_t T) { return std::max<int64_t>(1, std::min(threads, T)); }

// The row and operand types that a call is for, by its number: those of `_TYPES` in cpp.py.
template <class Function>
inline void dispatch(int64_t types, Function function) {
  switch (types) {
    case 0: return function(float{}, float{});
    case 1: return function(bf16{}, bf16{});
    case 2: return function(float{}, bf16{});
    case 3: return function(bf16{}, float{});
    case 4: return function(double{}, double{});
  }
}

}  // namespace
