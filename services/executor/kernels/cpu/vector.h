// Sixteen floats at a time, in the compiler's own vector types: one source for every instruction set. GCC and Clang map
// them to one AVX-512 register, two AVX ones or four of SSE or NEON.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

constexpr int kWidth = 16;

inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
inline vec load(const uint16_t* p) {  // bfloat16
  hvec h; std::memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, ivec) << 16);
}
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(uint16_t* p, vec v) {  // rounds to nearest even; NaN stays NaN
  const uvec bits = (uvec)v;
  const uvec nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uvec kept = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : nearest;
  const hvec h = __builtin_convertvector(kept, hvec);
  std::memcpy(p, &h, sizeof h);
}
// The value that storing as T and loading again would leave.
inline vec vec_as_stored(vec v, float) { return v; }
inline vec vec_as_stored(vec v, uint16_t) {
  const uvec bits = (uvec)v;
  const uvec nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return (vec)((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : nearest);
}
inline float widen(float x) { return x; }
inline float widen(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float narrow(float x, float) { return x; }
inline uint16_t narrow(float x, uint16_t) {  // round to nearest even; NaN stays NaN
  uint32_t u; std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0: 2^n * p(r) with a degree 6 polynomial; below -87 it is 0.
inline vec exp_nonpositive(vec x) {
  const vec lowest = vec{} - 87.0f;
  ivec dead = x < lowest;
  vec clipped = dead ? lowest : x;
  vec shifted = clipped * 1.44269504f + 12582912.0f;  // round to an integer in the low mantissa bits
  vec n = shifted - 12582912.0f;
  vec r = clipped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vec p = vec{} + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec result = p * (vec)power;
  return dead ? vec{} : result;
}
inline float reduce_max(vec v) { float m = v[0]; for (int i = 1; i < kWidth; ++i) m = std::max(m, v[i]); return m; }
inline float reduce_sum(vec v) {  // pairwise, a fixed order
  float s[16]; std::memcpy(s, &v, sizeof v);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; ++i) s[i] += s[i + w];
  return s[0];
}

