// What Python hands over for the products of a few vectors with matrices.
#pragma once

#include "decode.h"

namespace kvw {

// out[m, n] = sum over k of x[m, k] * weights[n, k], and bias[n].
struct Matrix {
  const uint8_t* weights;  // (N, K), the elements of a row side by side
  int64_t stride;          // of its rows, in bytes
  int64_t count;           // N
  const uint8_t* bias;     // (N,), or null
  uint8_t* out;            // (M, N), contiguous
};

// Everything is of one kind: FLOAT32, BFLOAT16 or FLOAT16.
struct Linear {
  const uint8_t* x;        // (M, K), contiguous
  int64_t vectors, width;  // M, and K, a multiple of 32
  int32_t kind, threads;
  int32_t matrices, unused;
};

}  // namespace kvw
