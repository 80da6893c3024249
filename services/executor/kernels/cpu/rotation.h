// A row times a block-diagonal Hadamard matrix: runs of 64 neighbours are turned, what is left over at the end is copied.
// Six stages of sums and differences at distances 1, 2, .., 32, in that order: int8.py has the same, to the bit.
#pragma once
#include "vector.h"

constexpr int kRotated = 64;

template <int D>
inline vec swapped(vec v) {  // elements i and i ^ D change places
#if defined(__clang__)
  return __builtin_shufflevector(v, v, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D, 8 ^ D, 9 ^ D, 10 ^ D,
                                 11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D);
#else
  const ivec places = {0 ^ D, 1 ^ D, 2 ^ D,  3 ^ D,  4 ^ D,  5 ^ D,  6 ^ D,  7 ^ D,
                       8 ^ D, 9 ^ D, 10 ^ D, 11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D};
  return __builtin_shuffle(v, places);
#endif
}

template <int D>
inline vec sums_and_differences(vec v) {
  const ivec element = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return swapped<D>(v) + ((element & D) != 0 ? -v : v);
}

template <typename T>
void rotate(const T* x, float* out, int64_t depth) {
  int64_t i = 0;
  for (; i + kRotated <= depth; i += kRotated) {
    vec v[4];
    for (int k = 0; k < 4; ++k) {
      v[k] = sums_and_differences<1>(load(x + i + k * kWidth));
      v[k] = sums_and_differences<8>(sums_and_differences<4>(sums_and_differences<2>(v[k])));
    }
    const vec a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    store(out + i, (a + c) * 0.125f);
    store(out + i + kWidth, (b + d) * 0.125f);
    store(out + i + 2 * kWidth, (a - c) * 0.125f);
    store(out + i + 3 * kWidth, (b - d) * 0.125f);
  }
  for (; i < depth; ++i) out[i] = widen(x[i]);
}
