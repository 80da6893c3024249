// Sixteen floats at a time, in the compiler's own vector types: one source for every instruction set. GCC and Clang map
// them to one AVX-512 register, two AVX ones or four of SSE or NEON.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

constexpr int kWidth = 16;

// bfloat16 is kept as uint16_t. It is rounded to nearest even; NaN stays NaN.
inline float widen(float x) { return x; }
inline float widen(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float narrow(float x, float) { return x; }
inline uint16_t narrow(float x, uint16_t) {
  uint32_t u; std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
inline vec widen(hvec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }
inline vec load(const uint16_t* p) { hvec h; std::memcpy(&h, p, sizeof h); return widen(h); }
inline hvec narrow(vec v) {
#if defined(__AVX512BF16__)
  return (hvec)_mm512_cvtneps_pbh((__m512)v);
#else
  const uvec bits = (uvec)v;
  const uvec nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : nearest, hvec);
#endif
}
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(uint16_t* p, vec v) { const hvec h = narrow(v); std::memcpy(p, &h, sizeof h); }
// The value that storing as T and loading again would leave.
inline float as_stored(float x, float) { return x; }
inline float as_stored(float x, uint16_t) { return widen(narrow(x, uint16_t{})); }
inline vec as_stored(vec v, float) { return v; }
inline vec as_stored(vec v, uint16_t) { return widen(narrow(v)); }

// A pack is what 32 bits hold: one float or two neighbouring bfloat16.
template <typename T> constexpr int kPack = 4 / sizeof(T);
inline uvec load_packs(const void* p) { uvec v; std::memcpy(&v, p, sizeof v); return v; }
inline uint32_t pack_at(const void* p) { uint32_t v; std::memcpy(&v, p, sizeof v); return v; }
// sum + a * b, summed within each pack; the later input of a pack is added first, or as the CPU's instruction does.
inline vec dot(vec sum, uvec a, uvec b, float) { return sum + (vec)a * (vec)b; }
inline vec dot(vec sum, uvec a, uvec b, uint16_t) {
#if defined(__AVX512BF16__)
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum += (vec)(a & 0xffff0000) * (vec)(b & 0xffff0000);
  return sum + (vec)(a << 16) * (vec)(b << 16);
#endif
}

// 2^x for x <= 0 to a relative 2e-7, and 0 below -126: 2^n times a polynomial in what is left of x.
inline vec exp2_nonpositive(vec x) {
  const vec lowest = vec{} - 126.0f;
  const ivec dead = x < lowest;
  x = dead ? lowest : x;
  const vec shifted = x + 12582912.0f;  // rounds to an integer, which lies in the low bits
  const vec r = x - (shifted - 12582912.0f);
  vec p = vec{} + 1.32647e-3f;
  p = p * r + 9.67151e-3f;
  p = p * r + 5.550734e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
  return dead ? vec{} : (vec)((ivec)p + ((ivec)shifted << 23));
}

template <int N> struct Halves { typedef float type __attribute__((vector_size(N * 4))); };
inline float reduce_max(vec v) {
  Halves<8>::type a, b; std::memcpy(&a, &v, 32); std::memcpy(&b, (char*)&v + 32, 32); a = a > b ? a : b;
  Halves<4>::type c, d; std::memcpy(&c, &a, 16); std::memcpy(&d, (char*)&a + 16, 16); c = c > d ? c : d;
  return std::max(std::max(c[0], c[2]), std::max(c[1], c[3]));
}
inline float reduce_sum(vec v) {  // pairwise, a fixed order
  Halves<8>::type a, b; std::memcpy(&a, &v, 32); std::memcpy(&b, (char*)&v + 32, 32); a += b;
  Halves<4>::type c, d; std::memcpy(&c, &a, 16); std::memcpy(&d, (char*)&a + 16, 16); c += d;
  return (c[0] + c[2]) + (c[1] + c[3]);
}
