// Sixteen floats at once, in the compiler's own vectors: AVX-512, AVX2, SSE and NEON come from the same lines.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
// Loops over lanes and accumulators have to be gone before the compiler decides what lies in registers.
#define KVW_UNROLL _Pragma("GCC unroll 16")
// What passes lanes on: where they are several vectors, a call passes them through memory.
#define KVW_INLINE inline __attribute__((always_inline))
#if KVW_LEVEL < 2
#include "parts.h"
#endif

namespace KVW_NS {
namespace {

#if KVW_LEVEL >= 2
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t B16 __attribute__((vector_size(16)));
typedef int8_t S16 __attribute__((vector_size(16)));
#endif

constexpr int LANES = 16;
constexpr int ALL = KVW_LEVEL >= 2 ? 16 : 4;  // accumulators that fit into the registers

#if KVW_LEVEL >= 2
template <class V>
inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V>
inline void store(void* to, const V& v) {
  memcpy(to, &v, sizeof v);
}
#endif
// The first n < 16 words; the others are ``rest``, or stay as they are in memory.
template <class V>
inline V load_some(const void* from, int64_t n, V rest) {
  memcpy(&rest, from, (size_t)n * 4);
  return rest;
}
template <class V>
inline void store_some(void* to, const V& v, int64_t n) {
  memcpy(to, &v, (size_t)n * 4);
}
KVW_INLINE F16 fill(float x) { return x - F16{}; }  // 0 + x would be added, since of -0 it makes 0
KVW_INLINE F16 bits(U16 x) { return (F16)x; }
#if KVW_LEVEL >= 2
template <class V>
KVW_INLINE V select(I16 where, V yes, V no) {
  return where ? yes : no;
}
#endif
KVW_INLINE F16 larger(F16 a, F16 b) {
#if KVW_LEVEL >= 2
  return (F16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

#if KVW_LEVEL >= 2
inline float sum(F16 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(F16 v) { return _mm512_reduce_max_ps((__m512)v); }

// Lane i of the result is the sum of all lanes of v[i].
inline F16 sums(const F16* v) {
  __m512 a[8], b[4], c[4];
  for (int i = 0; i < 8; i++) {
    const __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 4; i++) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  // Each lane of 128 bits of b[i] holds a part of the sums 4 i to 4 i + 3.
  for (int i = 0; i < 2; i++) {
    const __m512 x = b[2 * i], y = b[2 * i + 1];
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  return (F16)_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

inline F16 to_float(I16 x) { return __builtin_convertvector(x, F16); }
// Towards zero.
inline I16 to_int(F16 x) { return __builtin_convertvector(x, I16); }
// Sixteen whole numbers from memory.
inline U16 from_bytes(const uint8_t* x) { return __builtin_convertvector(load<B16>(x), U16); }
inline I16 from_signed_bytes(const uint8_t* x) { return __builtin_convertvector(load<S16>(x), I16); }
inline U16 from_words(const uint8_t* x) { return __builtin_convertvector(load<H16>(x), U16); }
// Of each lane the lowest byte.
inline void store_bytes(uint8_t* to, U16 x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
#endif

KVW_INLINE F16 from_bfloat16(const uint8_t* x) { return bits(from_words(x) << 16); }

// Without F16C: subnormal numbers go by a subtraction, so that no arithmetic ever meets a subnormal float.
KVW_INLINE F16 from_half_bits(U16 h) {
  const U16 m = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16, e = h & 0x7c00;
  const F16 normal = bits(m + (112u << 23)), tiny = bits(m + (113u << 23)) - 0x1p-14f;
  const F16 infinite = bits(m + (224u << 23));
  const F16 size = select((I16)(e == 0), tiny, select((I16)(e == 0x7c00), infinite, normal));
  return bits((U16)size | sign);
}
#if KVW_LEVEL >= 1
KVW_INLINE F16 from_halves(__m256i h) {
#if KVW_LEVEL >= 2
  return (F16)_mm512_cvtph_ps(h);
#else
  return {{(F16::V)_mm256_cvtph_ps(_mm256_castsi256_si128(h)), (F16::V)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))}};
#endif
}
#endif
KVW_INLINE F16 from_float16(const uint8_t* x) {
#if KVW_LEVEL >= 1
  return from_halves(_mm256_loadu_si256((const __m256i*)x));
#else
  return from_half_bits(from_words(x));
#endif
}
KVW_INLINE F16 from_e4m3(const uint8_t* x) {
#if KVW_LEVEL >= 1
  // As float16 bits, sign, exponent and mantissa mean the same number times 2^-8.
  const __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)x));
  const __m256i size = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x7f)), 7);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(c, 8), _mm256_set1_epi16((short)0x8000));
  return from_halves(_mm256_or_si256(size, sign)) * 256.0f;
#else
  const U16 c = from_bytes(x);
  const U16 m = (c & 0x7f) << 20, sign = (c & 0x80) << 24;
  const F16 size = select((I16)((c & 0x78) == 0), bits(m + (121u << 23)) - 0x1p-6f, bits(m + (120u << 23)));
  return bits((U16)size | sign);
#endif
}
KVW_INLINE F16 from_e8m0(const uint8_t* x) { return bits(from_bytes(x) << 23); }
KVW_INLINE F16 from_int8(const uint8_t* x) { return to_float(from_signed_bytes(x)); }
KVW_INLINE F16 from_e2m1(U16 c) {
  const U16 m = (c & 7) << 22, sign = (c & 8) << 28;
  const F16 size = select((I16)((c & 6) == 0), bits(m + (127u << 23)) - 1.0f, bits(m + (126u << 23)));
  return bits((U16)size | sign);
}

// exp of x <= 88, good to 2e-7 relative; 0 from -87 down, where results would be subnormal; NaN for NaN and infinity.
KVW_INLINE F16 exponential(F16 x) {
#if KVW_LEVEL >= 2
  const __m512 y = _mm512_max_ps(_mm512_set1_ps(-90.0f), (__m512)x);  // NaN stays
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 8);
  __m512 z = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), y);
  z = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), z);
  __m512 s = _mm512_fmadd_ps(z, _mm512_set1_ps(1.9875691500e-4f), _mm512_set1_ps(1.3981999507e-3f));
  s = _mm512_fmadd_ps(s, z, _mm512_set1_ps(8.3334519073e-3f));
  s = _mm512_fmadd_ps(s, z, _mm512_set1_ps(4.1665795894e-2f));
  s = _mm512_fmadd_ps(s, z, _mm512_set1_ps(1.6666665459e-1f));
  s = _mm512_fmadd_ps(s, z, _mm512_set1_ps(5.0000001201e-1f));
  s = _mm512_fmadd_ps(s, _mm512_mul_ps(z, z), _mm512_add_ps(z, _mm512_set1_ps(1.0f)));
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLE_UQ);
  return (F16)_mm512_maskz_scalef_ps(seen, s, n);
#endif
  const F16 magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const F16 whole = (x * 1.44269504f + magic) - magic;
  const F16 f = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  // The polynomial of the Cephes library's expf.
  F16 p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  // Unsigned, since what is too small for a result overflows here.
  const U16 power = (U16)to_int(whole) << 23;
  return select(x <= fill(-87.0f), F16{}, bits((U16)p + power));
}

}  // namespace
}  // namespace KVW_NS
