// What lies between the matrix products of a layer, for whoever runs it among other work; see elementwise.cpp.
// Every function but the last shares its rows among the threads of the parallel region that it is called in, and its
// threads wait for each other at the end. T is float or uint16_t (bfloat16).
#pragma once
#include <cstdint>

template <typename T>
void add_rms_norm_rows(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width, float eps);

// Without cos and sin nothing is turned.
struct Rotary {
  const void* qkv; const float* cos; const float* sin; const int32_t* positions; const int64_t* slots;
  const void* query_norm; const void* key_norm; void* query; void* cache;
  int64_t rows, heads, kv_heads, head_dim, block_size; float eps;
};
template <typename T> void rotary_write_rows(const Rotary& call);

template <typename T> void silu_mul_rows(const T* gate_up, T* out, int64_t rows, int64_t width);

// Whether so many values are worth more threads than one: about 10 us of work, for waking them costs as much.
inline bool worth_threads(int64_t values) { return values >= 1 << 15; }
