// Matrix products, for whoever runs them among other work; see bf16.cpp and int8.cpp.
// The functions share their work among the threads of the parallel region that they are called in, and its threads
// wait for each other at the end.
#pragma once
#include <cstdint>

// Weights that were laid out once. Also written by Python: products.py.
struct Product {
  const void* weights; const void* bias;
  const float* scales; const int32_t* offsets;  // of int8 weights only
  int64_t columns, depth;
};

void bfloat16_rows(const Product& product, const uint16_t* x, uint16_t* out, int64_t rows);

// Rows as int8: room for them, which all threads of a region see.
struct QuantizedRows {
  uint8_t* values;  // [rows, depth up to a multiple of 4]
  float* scales;    // [rows]
};
template <typename T>
void int8_rows(const Product& product, const T* x, T* out, int64_t rows, const QuantizedRows& quantized);

// Whether the weights are worth more threads than one.
inline bool worth_threads(const Product& p) { return p.columns * p.depth >= 1 << 15; }
