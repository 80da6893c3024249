// Products of bfloat16 rows with bfloat16 weights: out = x W^T + bias, on CPUs whose dot product takes bfloat16 pairs.
// Each output is one fp32 sum over pairs of inputs from the first on, whatever the number of rows or threads, so a row
// has the same bits alone and in any batch. One row reads the weights once and does nothing else: no padding to two.
//
// Weights are packed as [columns / 32][depth / 2][32][2]: one 64-byte vector holds two neighbouring inputs of sixteen
// columns. The depth is even.
#include "vector.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kColumns = 32;
constexpr int kRows = 12;  // rows that share one read of the weights: 24 vectors of sums, which fit 32 registers
constexpr int64_t kWorthThreads = 1 << 16;  // bytes of weights below which threads cost more than they give

struct Product {
  const uint16_t* x; const uint16_t* weights; const uint16_t* bias; uint16_t* out;
  int64_t rows, columns, depth;
};

#if defined(__x86_64__)
#define NEEDS_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

template <int M>
NEEDS_BF16 void sums_of(const uint16_t* x, int64_t depth, const uint16_t* weights, float (*sums)[kColumns]) {
  __m512 low[M], high[M];
#pragma GCC unroll 12  // all three loops, or the sums live in memory
  for (int r = 0; r < M; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k += 2, weights += 2 * kColumns) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(weights), second = (__m512bh)_mm512_loadu_si512(weights + 32);
#pragma GCC unroll 12
    for (int r = 0; r < M; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * depth + k, 4);
      const __m512bh each = (__m512bh)_mm512_set1_epi32(pair);
      low[r] = _mm512_dpbf16_ps(low[r], each, first);
      high[r] = _mm512_dpbf16_ps(high[r], each, second);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < M; ++r) {
    _mm512_storeu_ps(sums[r], low[r]);
    _mm512_storeu_ps(sums[r] + 16, high[r]);
  }
}

using Sums = void (*)(const uint16_t*, int64_t, const uint16_t*, float (*)[kColumns]);
constexpr Sums kSums[kRows + 1] = {nullptr,    sums_of<1>, sums_of<2>, sums_of<3>,  sums_of<4>,  sums_of<5>, sums_of<6>,
                                   sums_of<7>, sums_of<8>, sums_of<9>, sums_of<10>, sums_of<11>, sums_of<12>};

void finish(const Product& p, const float* sums, int64_t row, int64_t first) {
  uint16_t* out = p.out + row * p.columns;
  const int64_t last = std::min(first + kColumns, p.columns);
  int64_t n = first;
  for (; n + kWidth <= last; n += kWidth) store(out + n, load(sums + n - first) + (p.bias ? load(p.bias + n) : vec{}));
  for (; n < last; ++n) out[n] = narrow(sums[n - first] + (p.bias ? widen(p.bias[n]) : 0.0f), uint16_t{});
}
#endif

}  // namespace

extern "C" int has_bfloat16_product() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl");
#else
  return 0;
#endif
}

extern "C" void bfloat16_product(const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out,
                                 int64_t rows, int64_t columns, int64_t depth) {
#if defined(__x86_64__)
  const Product p{x, weights, bias, out, rows, columns, depth};
  const int64_t groups = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for if (groups > 1 && groups * kColumns * depth * 2 >= kWorthThreads)
  for (int64_t g = 0; g < groups; ++g) {
    alignas(64) float sums[kRows][kColumns];
    for (int64_t r = 0; r < p.rows; r += kRows) {
      const int m = int(std::min<int64_t>(kRows, p.rows - r));
      kSums[m](p.x + r * p.depth, p.depth, p.weights + g * kColumns * p.depth, sums);
      for (int i = 0; i < m; ++i) finish(p, sums[i], r + i, g * kColumns);
    }
  }
#endif
}
