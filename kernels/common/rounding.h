// Stochastic rounding to bf16: the function of rounding.py, to the bit.

#pragma once

#include "rows.h"

namespace {

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Rounding {
  int64_t key, first_row, first_column;

  // What all columns of a row have in common.
  uint32_t of_row(int64_t row) const {
    const uint64_t place = row + first_row;
    const uint32_t number = static_cast<uint32_t>(place >> 32) * 0x9e3779b9u ^ static_cast<uint32_t>(place);
    return mix(mix(number ^ static_cast<uint32_t>(key >> 32)) + static_cast<uint32_t>(key));
  }

  bf16 round(float value, uint32_t of_row, int64_t column) const {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t number = static_cast<uint32_t>(column + first_column);
    const uint32_t random = mix(of_row ^ (number * 0x9e3779b9u)) >> 16;
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return bf16{static_cast<uint16_t>((bits + (finite ? random : 0)) >> 16)};
  }
};

}  // namespace
