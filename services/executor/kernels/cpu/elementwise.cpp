// What lies between the matrix products of a layer: RMSNorm with the residual sum, rotary embedding with the KV write,
// and SiLU times up. Rows are independent and each is reduced in one fixed order, so a row's bits never depend on others.
// Sums are fp32; results are rounded to the storage type where a plain PyTorch model would round them.
#include "vector.h"

namespace {

constexpr int64_t kWorthThreads = 1 << 15;  // elements, about 20 us: below that waking threads costs more

template <typename T> inline T rounded(float x) { return narrow(x, T{}); }
template <typename T> inline float as_stored(float x) { return widen(rounded<T>(x)); }

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
  for (; i + kWidth <= width; i += kWidth) store(out + i, vec_as_stored(load(x + i) * factor, T{}) * load(weight + i));
  for (; i < width; ++i) out[i] = rounded<T>(as_stored<T>(widen(x[i]) * factor) * widen(weight[i]));
}

template <typename T>
void add_rms_norm_rows(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows * width >= kWorthThreads)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * width;
    if (residual) {
      T* sum = residual + r * width;
      int64_t i = 0;
      for (; i + kWidth <= width; i += kWidth) store(sum + i, load(sum + i) + load(row + i));
      for (; i < width; ++i) sum[i] = rounded<T>(widen(sum[i]) + widen(row[i]));
      row = sum;
    }
    normalize(row, weight, out + r * width, width, eps);
  }
}

// The two halves of one head, turned by the row's angles: (a, b) -> (a cos - b sin, b cos + a sin). Only copied where
// there are no angles.
template <typename T>
void turn(const T* x, const float* cos, const float* sin, T* out, int64_t stride, int64_t half) {
  if (!cos) {
    for (int64_t i = 0; i < 2 * half; ++i) out[i * stride] = x[i];
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(x[i]), b = widen(x[i + half]), c = as_stored<T>(cos[i]), s = as_stored<T>(sin[i]);
    out[i * stride] = rounded<T>(as_stored<T>(a * c) - as_stored<T>(b * s));
    out[(i + half) * stride] = rounded<T>(as_stored<T>(b * c) + as_stored<T>(a * s));
  }
}

struct Rotary {
  const void* qkv; const float* cos; const float* sin; const int32_t* positions; const int64_t* slots;
  const void* query_norm; const void* key_norm; void* query; void* keys; void* values;
  int64_t rows, heads, kv_heads, head_dim, block_size; float eps;
};

template <typename T>
void rotary_rows(const Rotary& c) {
  const int64_t D = c.head_dim, half = D / 2, B = c.block_size;
#pragma omp parallel for if (c.rows * (c.heads + 2 * c.kv_heads) * D >= kWorthThreads)
  for (int64_t r = 0; r < c.rows; ++r) {
    const T* row = static_cast<const T*>(c.qkv) + r * (c.heads + 2 * c.kv_heads) * D;
    const float* cos = c.cos ? c.cos + c.positions[r] * half : nullptr;
    const float* sin = c.sin ? c.sin + c.positions[r] * half : nullptr;
    alignas(64) T head[512];
    for (int64_t h = 0; h < c.heads; ++h, row += D) {
      const T* x = row;
      if (c.query_norm) { normalize(row, static_cast<const T*>(c.query_norm), head, D, c.eps); x = head; }
      turn(x, cos, sin, static_cast<T*>(c.query) + (r * c.heads + h) * D, 1, half);
    }
    const int64_t block = c.slots[r] / B, offset = c.slots[r] % B;
    for (int64_t h = 0; h < c.kv_heads; ++h, row += D) {
      const T* x = row;
      if (c.key_norm) { normalize(row, static_cast<const T*>(c.key_norm), head, D, c.eps); x = head; }
      turn(x, cos, sin, static_cast<T*>(c.keys) + (block * c.kv_heads + h) * D * B + offset, B, half);
    }
    for (int64_t h = 0; h < c.kv_heads; ++h, row += D)
      std::memcpy(static_cast<T*>(c.values) + ((block * c.kv_heads + h) * B + offset) * D, row, D * sizeof(T));
  }
}

inline vec sigmoid(vec x) {
  const vec e = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : vec{} + 1.0f) / (e + 1.0f);
}

template <typename T>
inline void silu_mul_vec(const T* gate, const T* up, T* out) {
  const vec g = load(gate);
  store(out, vec_as_stored(g * sigmoid(g), T{}) * load(up));
}

template <typename T>
void silu_mul_rows(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width >= kWorthThreads)
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

}  // namespace

extern "C" void add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t width,
                             float eps, int bfloat16) {
  if (bfloat16)
    add_rms_norm_rows(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(residual),
                      static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(out), rows, width, eps);
  else
    add_rms_norm_rows(static_cast<const float*>(x), static_cast<float*>(residual), static_cast<const float*>(weight),
                      static_cast<float*>(out), rows, width, eps);
}

extern "C" void rotary_write(const void* qkv, const float* cos, const float* sin, const int32_t* positions,
                             const int64_t* slots, const void* query_norm, const void* key_norm, void* query, void* keys,
                             void* values, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t block_size, float eps, int bfloat16) {
  const Rotary c{qkv, cos, sin, positions, slots, query_norm, key_norm, query, keys, values,
                 rows, heads, kv_heads, head_dim, block_size, eps};
  bfloat16 ? rotary_rows<uint16_t>(c) : rotary_rows<float>(c);
}

extern "C" void silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int bfloat16) {
  if (bfloat16)
    silu_mul_rows(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), rows, width);
  else
    silu_mul_rows(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width);
}
