// Products of rows with int8 weights: out = x W^T + bias. Weights carry one scale a column, activations one scale a row,
// both chosen from the values of that column or row alone. The sums are integers, so no order of adding, no
// number of rows or threads and no instruction set moves a bit; what is rounded is rounded element by element.
//
// Weights are packed as [columns / 32][depth / 4][32][4]: one 64-byte vector holds four neighbouring inputs of sixteen
// columns, which is what VNNI's dot product reads. Activations are stored plus 128, as that instruction wants one side
// unsigned; 128 times the column's sum is taken off again. Rows are turned before they are quantized, as the weights were:
// see rotation.h.
#pragma GCC optimize("fp-contract=off")  // a product is rounded before it is added: as plain torch and every CPU do
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
#include "products.h"

#include <vector>

#include "rotation.h"
#include "vector.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kColumns = 32;
constexpr int kRows = 12;  // rows that share one read of the weights: 24 vectors of sums, which fit 32 registers

typedef uint8_t bytes __attribute__((vector_size(16)));

// Quantize one row: out[i] = round(turned x[i] / scale) + 128. Returns the scale; NaN where the row holds NaN or an
// infinity. ``turned`` has room for the row.
template <typename T>
float quantize(const T* x, float* turned, uint8_t* out, int64_t depth, int64_t padded) {
  rotate(x, turned, depth);
  vec top = {}, poison = {};
  float last = 0, last_poison = 0;
  int64_t i = 0;
  for (; i + kWidth <= depth; i += kWidth) {
    const vec v = load(turned + i), size = v < 0.0f ? -v : v;
    top = size > top ? size : top;
    poison += v * 0.0f;
  }
  for (; i < depth; ++i) { last = std::max(last, std::fabs(turned[i])); last_poison += turned[i] * 0.0f; }
  const float largest = std::max(reduce_max(top), last);
  const float factor = largest > 0 ? 127.0f / largest : 0.0f;
  if (reduce_sum(poison) + last_poison != 0.0f || !(factor < INFINITY)) {  // not finite, or too small to tell from 0
    std::memset(out, 128, padded);
    return largest < 1.0f && reduce_sum(poison) + last_poison == 0.0f ? 0.0f : NAN;
  }
  for (i = 0; i + kWidth <= depth; i += kWidth) {
    const vec shifted = load(turned + i) * factor + 12582912.0f;  // the integer lies in the low bits
    const bytes q = __builtin_convertvector((ivec)shifted - (0x4B400000 - 128), bytes);
    std::memcpy(out + i, &q, sizeof q);
  }
  for (; i < depth; ++i) out[i] = uint8_t(int(std::nearbyint(turned[i] * factor)) + 128);
  std::memset(out + depth, 128, padded - depth);
  return largest / 127.0f;
}

// Sums of M rows and one group of columns, on any machine.
void sums_plain(const uint8_t* x, int64_t depth, const int8_t* weights, int m, int32_t (*sums)[kColumns]) {
  for (int r = 0; r < m; ++r) {
    int32_t total[kColumns] = {};
    for (int64_t k = 0; k < depth; k += 4)
      for (int64_t n = 0; n < kColumns; ++n)
        for (int j = 0; j < 4; ++j) total[n] += int32_t(x[r * depth + k + j]) * weights[(k * kColumns) + n * 4 + j];
    std::memcpy(sums[r], total, sizeof total);
  }
}

#if defined(__x86_64__)
template <int M>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) void sums_vnni(
    const uint8_t* x, int64_t depth, const int8_t* weights, int32_t (*sums)[kColumns]) {
  __m512i low[M], high[M];
#pragma GCC unroll 12
  for (int r = 0; r < M; ++r) low[r] = high[r] = _mm512_setzero_si512();
  for (int64_t k = 0; k < depth; k += 4, weights += 4 * kColumns) {
    const __m512i first = _mm512_loadu_si512(weights), second = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 12
    for (int r = 0; r < M; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * depth + k, 4);
      const __m512i each = _mm512_set1_epi32(four);
      low[r] = _mm512_dpbusd_epi32(low[r], each, first);
      high[r] = _mm512_dpbusd_epi32(high[r], each, second);
    }
  }
#pragma GCC unroll 12  // all three loops, or the sums live in memory
  for (int r = 0; r < M; ++r) {
    _mm512_storeu_si512(sums[r], low[r]);
    _mm512_storeu_si512(sums[r] + 16, high[r]);
  }
}

using Sums = void (*)(const uint8_t*, int64_t, const int8_t*, int32_t (*)[kColumns]);
constexpr Sums kVnni[kRows + 1] = {nullptr,       sums_vnni<1>, sums_vnni<2>, sums_vnni<3>,  sums_vnni<4>,
                                   sums_vnni<5>,  sums_vnni<6>, sums_vnni<7>, sums_vnni<8>,  sums_vnni<9>,
                                   sums_vnni<10>, sums_vnni<11>, sums_vnni<12>};
bool has_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
  return has;
}
#endif

void sums_of(const uint8_t* x, int64_t depth, const int8_t* weights, int m, int32_t (*sums)[kColumns]) {
#if defined(__x86_64__)
  if (has_vnni()) return kVnni[m](x, depth, weights, sums);
#endif
  sums_plain(x, depth, weights, m, sums);
}

// From one row's integer sums to its outputs. Never inlined: one piece of code rounds for every number of rows.
template <typename T>
__attribute__((noinline)) void finish(const Product& p, const int32_t* sums, float row_scale, T* out, int64_t first) {
  const T* bias = static_cast<const T*>(p.bias);
  const int64_t last = std::min(first + kColumns, p.columns);
  int64_t n = first;
  for (; n + kWidth <= last; n += kWidth) {
    ivec sum, offset;
    std::memcpy(&sum, sums + n - first, sizeof sum);
    std::memcpy(&offset, p.offsets + n, sizeof offset);
    vec result = __builtin_convertvector(sum - offset, vec) * (load(p.scales + n) * row_scale);
    if (bias) result += load(bias + n);
    store(out + n, result);
  }
  for (; n < last; ++n) {
    float result = float(sums[n - first] - p.offsets[n]) * (p.scales[n] * row_scale);
    if (bias) result += widen(bias[n]);
    out[n] = narrow(result, T{});
  }
}

template <typename T>
void product(const Product& p, const T* x, T* out, int64_t rows) {
  static thread_local std::vector<uint8_t> values;  // kept: a step makes hundreds of calls
  static thread_local std::vector<float> scales;
  const int64_t size = rows * ((p.depth + 3) / 4 * 4);
  if (int64_t(values.size()) < size) values.resize(size);
  if (int64_t(scales.size()) < rows) scales.resize(rows);
  const QuantizedRows quantized{values.data(), scales.data()};
#pragma omp parallel if (worth_threads(p))
  int8_rows(p, x, out, rows, quantized);
}

}  // namespace

template <typename T>
void int8_rows(const Product& p, const T* x, T* out, int64_t rows, const QuantizedRows& quantized) {
  const int64_t padded = (p.depth + 3) / 4 * 4, groups = (p.columns + kColumns - 1) / kColumns;
  const auto* weights = static_cast<const int8_t*>(p.weights);
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    static thread_local std::vector<float> turned;
    if (int64_t(turned.size()) < p.depth) turned.resize(p.depth);
    quantized.scales[r] = quantize(x + r * p.depth, turned.data(), quantized.values + r * padded, p.depth, padded);
  }
#pragma omp for schedule(static)
  for (int64_t g = 0; g < groups; ++g) {
    alignas(64) int32_t sums[kRows][kColumns];
    for (int64_t r = 0; r < rows; r += kRows) {
      const int m = int(std::min<int64_t>(kRows, rows - r));
      sums_of(quantized.values + r * padded, padded, weights + g * kColumns * padded, m, sums);
      for (int i = 0; i < m; ++i)
        finish(p, sums[i], quantized.scales[r + i], out + (r + i) * p.columns, g * kColumns);
    }
  }
}
template void int8_rows(const Product&, const float*, float*, int64_t, const QuantizedRows&);
template void int8_rows(const Product&, const uint16_t*, uint16_t*, int64_t, const QuantizedRows&);

extern "C" void int8_product(const Product* p, const void* x, void* out, int64_t rows, int bfloat16) {
  if (bfloat16) product(*p, static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out), rows);
  else product(*p, static_cast<const float*>(x), static_cast<float*>(out), rows);
}
