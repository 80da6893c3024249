// Products of bfloat16 rows with bfloat16 weights: out = x W^T + bias, on CPUs whose dot product takes bfloat16 pairs.
// Each output is one fp32 sum over pairs of inputs from the first on, whatever the number of rows or threads, so a row
// has the same bits alone and in any batch. One row reads the weights once and does nothing else: no padding to two.
//
// Weights are packed as [columns / 32][depth / 2][32][2]: one 64-byte vector holds two neighbouring inputs of sixteen
// columns. The depth is even.
#include "products.h"

#include "vector.h"

namespace {

constexpr int64_t kColumns = 32;
constexpr int kRows = 12;  // rows that share one read of the weights: 24 vectors of sums, which fit 32 registers

template <int M>
void sums_of(const uint16_t* x, int64_t depth, const uint16_t* weights, float (*sums)[kColumns]) {
  vec low[M], high[M];
#pragma GCC unroll 12  // all three loops, or the sums live in memory
  for (int r = 0; r < M; ++r) low[r] = high[r] = vec{};
  for (int64_t k = 0; k < depth; k += 2, weights += 2 * kColumns) {
    const uvec first = load_packs(weights), second = load_packs(weights + kColumns);
#pragma GCC unroll 12
    for (int r = 0; r < M; ++r) {
      const uvec each = uvec{} + pack_at(x + r * depth + k);
      low[r] = dot(low[r], each, first, uint16_t{});
      high[r] = dot(high[r], each, second, uint16_t{});
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < M; ++r) {
    store(sums[r], low[r]);
    store(sums[r] + kWidth, high[r]);
  }
}

using Sums = void (*)(const uint16_t*, int64_t, const uint16_t*, float (*)[kColumns]);
constexpr Sums kSums[kRows + 1] = {nullptr,    sums_of<1>, sums_of<2>, sums_of<3>,  sums_of<4>,  sums_of<5>, sums_of<6>,
                                   sums_of<7>, sums_of<8>, sums_of<9>, sums_of<10>, sums_of<11>, sums_of<12>};

void finish(const Product& p, const float* sums, uint16_t* out, int64_t first) {
  const auto* bias = static_cast<const uint16_t*>(p.bias);
  const int64_t last = std::min(first + kColumns, p.columns);
  int64_t n = first;
  for (; n + kWidth <= last; n += kWidth) store(out + n, load(sums + n - first) + (bias ? load(bias + n) : vec{}));
  for (; n < last; ++n) out[n] = narrow(sums[n - first] + (bias ? widen(bias[n]) : 0.0f), uint16_t{});
}

}  // namespace

void bfloat16_rows(const Product& p, const uint16_t* x, uint16_t* out, int64_t rows) {
  const auto* weights = static_cast<const uint16_t*>(p.weights);
  const int64_t groups = (p.columns + kColumns - 1) / kColumns;
#pragma omp for schedule(static)
  for (int64_t g = 0; g < groups; ++g) {
    alignas(64) float sums[kRows][kColumns];
    for (int64_t r = 0; r < rows; r += kRows) {
      const int m = int(std::min<int64_t>(kRows, rows - r));
      kSums[m](x + r * p.depth, p.depth, weights + g * kColumns * p.depth, sums);
      for (int i = 0; i < m; ++i) finish(p, sums[i], out + (r + i) * p.columns, g * kColumns);
    }
  }
}

// Elsewhere another library's product is the faster one.
extern "C" int has_bfloat16_product() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

extern "C" void bfloat16_product(const Product* product, const void* x, void* out, int64_t rows) {
#pragma omp parallel if (worth_threads(*product))
  bfloat16_rows(*product, static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out), rows);
}
