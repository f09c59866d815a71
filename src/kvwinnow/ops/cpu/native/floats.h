// Numbers in and out of the floats that tensors hold, rounded to the nearest, ties to even ones.
#pragma once

#include "decode.h"
#include "lanes.h"

namespace KVW_NS {
namespace {

using namespace kvw;

inline uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}
inline float of_bits(uint32_t b) {
  float x;
  memcpy(&x, &b, 4);
  return x;
}

inline uint16_t to_half(float x) {
#if KVW_LEVEL >= 1
  return _cvtss_sh(x, 0);
#else
  const uint32_t b = bits_of(x), m = b & 0x7fffffff;
  uint32_t h;
  if (m > 0x7f800000) {
    h = 0x7e00 | (m >> 13 & 0x3ff);
  } else if (m >= 0x477ff000) {  // rounds to more than 65,504
    h = 0x7c00;
  } else if (m < 0x38800000) {  // subnormal: in units of 2^-24
    h = bits_of(of_bits(m) + 0.5f) - bits_of(0.5f);
  } else {
    h = (m + 0xfff + (m >> 13 & 1) - (112u << 23)) >> 13;
  }
  return (uint16_t)(h | (b >> 16 & 0x8000));
#endif
}
inline float from_half(uint16_t h) {
#if KVW_LEVEL >= 1
  return _cvtsh_ss(h);
#else
  return from_half_bits(U16{} + h)[0];
#endif
}
inline uint16_t to_bfloat16(float x) {
  const uint32_t b = bits_of(x);
  if (x != x) return (uint16_t)(b >> 16 | 0x40);
  return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

inline bool is_float(int32_t kind) { return kind >= FLOAT32 && kind <= FLOAT16; }
constexpr int64_t size_of(int32_t kind) { return kind == FLOAT32 ? 4 : 2; }

inline F16 sixteen(const uint8_t* from, int32_t kind) {
  return kind == FLOAT32 ? load<F16>(from) : kind == BFLOAT16 ? from_bfloat16(from) : from_float16(from);
}

inline void take(const uint8_t* from, int32_t kind, int64_t dim, float* x) {
  const int64_t size = size_of(kind);
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(x + i, sixteen(from + i * size, kind));
  if (i < dim) {
    uint8_t rest[4 * LANES] = {};
    memcpy(rest, from + i * size, (size_t)((dim - i) * size));
    store(x + i, sixteen(rest, kind));
  }
}

inline void give(const float* x, int64_t dim, uint8_t* to, int32_t kind) {
  if (kind == FLOAT32) {
    memcpy(to, x, (size_t)dim * 4);
  } else if (kind == BFLOAT16) {
    for (int64_t i = 0; i < dim; i++) {
      const uint16_t b = to_bfloat16(x[i]);
      memcpy(to + 2 * i, &b, 2);
    }
  } else {
    for (int64_t i = 0; i < dim; i++) {
      const uint16_t h = to_half(x[i]);
      memcpy(to + 2 * i, &h, 2);
    }
  }
}

}  // namespace
}  // namespace KVW_NS
