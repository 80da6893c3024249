// What lies between the matrix products of a layer: RMSNorm with the residual sum, rotary embedding with the KV write,
// and SiLU times up. Rows are independent and each is reduced in one fixed order, so a row's bits never depend on others.
// Sums are fp32; results are rounded to the storage type where a plain PyTorch model would round them.
#include "elementwise.h"

#include "vector.h"

namespace {

constexpr int64_t kMaxHalf = 128;  // half of the largest head_dim

template <typename T>
float mean_square(const T* x, int64_t width) {
  vec sum = {};
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) { const vec v = load(x + i); sum += v * v; }
  float total = reduce_sum(sum);
  for (; i < width; ++i) total += widen(x[i]) * widen(x[i]);
  return total / float(width);
}

template <typename T>
void normalize(const T* x, const T* weight, T* out, int64_t width, float eps) {
  const float factor = 1.0f / std::sqrt(mean_square(x, width) + eps);
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store(out + i, as_stored(load(x + i) * factor, T{}) * load(weight + i));
  for (; i < width; ++i) out[i] = narrow(as_stored(widen(x[i]) * factor, T{}) * widen(weight[i]), T{});
}

// The angles of a position, rounded as a plain model would; zeros up to a whole vector.
template <typename T>
struct Angles {
  alignas(64) float cos[kMaxHalf], sin[kMaxHalf];

  // None where there is no table.
  Angles(const float* all_cos, const float* all_sin, int64_t position, int64_t half) {
    if (!all_cos) return;
    const float* c = all_cos + position * half;
    const float* s = all_sin + position * half;
    for (int64_t i = 0; i < half; ++i) { cos[i] = as_stored(c[i], T{}); sin[i] = as_stored(s[i], T{}); }
    for (int64_t i = half; i % kWidth; ++i) cos[i] = sin[i] = 0;
  }
};

// One head [2 * half], its two halves turned: (a, b) -> (a cos - b sin, b cos + a sin).
template <typename T>
void turn(const T* x, const Angles<T>& angles, T* out, int64_t half) {
  alignas(64) T a[kMaxHalf] = {}, b[kMaxHalf] = {};
  std::memcpy(a, x, half * sizeof(T));
  std::memcpy(b, x + half, half * sizeof(T));
  for (int64_t i = 0; i < half; i += kWidth) {
    const vec first = load(a + i), second = load(b + i), c = load(angles.cos + i), s = load(angles.sin + i);
    store(a + i, as_stored(first * c, T{}) - as_stored(second * s, T{}));
    store(b + i, as_stored(second * c, T{}) + as_stored(first * s, T{}));
  }
  std::memcpy(out, a, half * sizeof(T));
  std::memcpy(out + half, b, half * sizeof(T));
}

// One head into its slot among the keys of a block, which lie as paged_attention.cpp says.
template <typename T>
void write_key(const T* head, T* block, int64_t offset, int64_t block_size, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kPack<T>)
    std::memcpy(block + d * block_size + offset * kPack<T>, head + d, sizeof(uint32_t));
}

// One head into its slot among the values of a block. Another thread may write the rest of a pack.
template <typename T>
void write_value(const T* head, T* block, int64_t offset, int64_t dim) {
  T* to = block + offset / kPack<T> * dim * kPack<T> + offset % kPack<T>;
  for (int64_t d = 0; d < dim; ++d) to[d * kPack<T>] = head[d];
}

template <typename T>
void rotary_write_row(const Rotary& c, int64_t r) {
  const int64_t D = c.head_dim, half = D / 2;
  const T* row = static_cast<const T*>(c.qkv) + r * (c.heads + 2 * c.kv_heads) * D;
  const Angles<T> angles(c.cos, c.sin, c.positions[r], half);
  alignas(64) T head[2 * kMaxHalf];
  const auto turned = [&](const void* norm, T* out) {
    if (norm) normalize(row, static_cast<const T*>(norm), head, D, c.eps);
    const T* x = norm ? head : row;
    if (c.cos) turn(x, angles, out, half);
    else if (x != out) std::memcpy(out, x, D * sizeof(T));
    row += D;
  };
  for (int64_t h = 0; h < c.heads; ++h) turned(c.query_norm, static_cast<T*>(c.query) + (r * c.heads + h) * D);
  const int64_t block = c.slots[r] / c.block_size, offset = c.slots[r] % c.block_size;
  const int64_t size = c.block_size * D;  // of the keys of a head, and of its values
  T* to = static_cast<T*>(c.cache) + block * c.kv_heads * 2 * size;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    turned(c.key_norm, head);
    write_key(head, to + h * 2 * size, offset, c.block_size, D);
  }
  for (int64_t h = 0; h < c.kv_heads; ++h, row += D) write_value(row, to + (h * 2 + 1) * size, offset, D);
}

inline vec sigmoid(vec x) {
  const vec e = exp2_nonpositive((x < 0.0f ? x : -x) * 1.44269504f);
  return (x < 0.0f ? e : vec{} + 1.0f) / (e + 1.0f);
}

template <typename T>
inline void silu_mul_vec(const T* gate, const T* up, T* out) {
  const vec g = load(gate);
  store(out, as_stored(g * sigmoid(g), T{}) * load(up));
}

}  // namespace

template <typename T>
void add_rms_norm_rows(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width, float eps) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * width;
    if (residual) {
      T* sum = residual + r * width;
      int64_t i = 0;
      for (; i + kWidth <= width; i += kWidth) store(sum + i, load(sum + i) + load(row + i));
      for (; i < width; ++i) sum[i] = narrow(widen(sum[i]) + widen(row[i]), T{});
      row = sum;
    }
    normalize(row, weight, out + r * width, width, eps);
  }
}

template <typename T>
void rotary_write_rows(const Rotary& call) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < call.rows; ++r) rotary_write_row<T>(call, r);
}

template <typename T>
void silu_mul_rows(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = gate_up + r * 2 * width;
    const T* up = gate + width;
    int64_t i = 0;
    for (; i + kWidth <= width; i += kWidth) silu_mul_vec(gate + i, up + i, out + r * width + i);
    if (i < width) {
      T g[kWidth] = {}, u[kWidth] = {}, o[kWidth];
      std::memcpy(g, gate + i, (width - i) * sizeof(T));
      std::memcpy(u, up + i, (width - i) * sizeof(T));
      silu_mul_vec(g, u, o);
      std::memcpy(out + r * width + i, o, (width - i) * sizeof(T));
    }
  }
}

template void add_rms_norm_rows(const float*, float*, const float*, float*, int64_t, int64_t, float);
template void add_rms_norm_rows(const uint16_t*, uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, float);
template void rotary_write_rows<float>(const Rotary&);
template void rotary_write_rows<uint16_t>(const Rotary&);
template void silu_mul_rows(const float*, float*, int64_t, int64_t);
template void silu_mul_rows(const uint16_t*, uint16_t*, int64_t, int64_t);

extern "C" void add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t width,
                             float eps, int bfloat16) {
#pragma omp parallel if (worth_threads(rows * width))
  if (bfloat16)
    add_rms_norm_rows(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(residual),
                      static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(out), rows, width, eps);
  else
    add_rms_norm_rows(static_cast<const float*>(x), static_cast<float*>(residual), static_cast<const float*>(weight),
                      static_cast<float*>(out), rows, width, eps);
}

extern "C" void rotary_write(const void* qkv, const float* cos, const float* sin, const int32_t* positions,
                             const int64_t* slots, const void* query_norm, const void* key_norm, void* query, void* cache,
                             int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t block_size, float eps, int bfloat16) {
  const Rotary c{qkv, cos, sin, positions, slots, query_norm, key_norm, query, cache,
                 rows, heads, kv_heads, head_dim, block_size, eps};
#pragma omp parallel if (worth_threads(rows * (heads + 2 * kv_heads) * head_dim))
  if (bfloat16) rotary_write_rows<uint16_t>(c);
  else rotary_write_rows<float>(c);
}

extern "C" void silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int bfloat16) {
#pragma omp parallel if (worth_threads(rows * width))
  if (bfloat16) silu_mul_rows(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), rows, width);
  else silu_mul_rows(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width);
}
