// Products of 64-bit numbers, from which quotients by a known reciprocal are made.

#pragma once

#include <cstdint>

namespace {

// The upper half of a product, of 32-bit halves: vectors have no instruction for it, and GCC makes vectors of this.
inline uint64_t upper_product(uint64_t a, uint64_t b) {
  const uint64_t low = 0xFFFFFFFFull;
  const uint64_t a0 = a & low, a1 = a >> 32, b0 = b & low, b1 = b >> 32;
  const uint64_t middle = a1 * b0 + ((a0 * b0) >> 32);
  return a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & low)) >> 32);
}

}  // namespace
