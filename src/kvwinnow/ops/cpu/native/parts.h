// Sixteen lanes where the machine's vectors have fewer. Of vectors that are wider than the machine's gcc keeps none in
// registers: each operation goes through memory, and comparing, widening and shuffling by single elements, which took
// longer than torch takes. So these are several vectors of the machine's own width, with the operators of one.
#pragma once

#include <cstdint>
#include <cstring>

namespace KVW_NS {
namespace {

constexpr int PART = KVW_LEVEL == 1 ? 8 : 4;  // lanes of a vector: AVX2's; SSE's and NEON's

template <class E>
struct Lanes {
  static constexpr int COUNT = 16 / PART;
  typedef E V __attribute__((vector_size(PART * sizeof(E))));
  V part[COUNT];

  E operator[](int i) const { return part[i / PART][i % PART]; }
  template <class O>
  explicit operator Lanes<O>() const {
    Lanes<O> out;
    KVW_UNROLL for (int i = 0; i < COUNT; i++) out.part[i] = (typename Lanes<O>::V)part[i];
    return out;
  }
};

template <class T>
struct Same {
  typedef T type;
};

// Of two vectors, or of a vector and a number; R: the elements of what comes out.
#define KVW_OPERATOR(op, R)                                                                                   \
  template <class E>                                                                                          \
  KVW_INLINE Lanes<R> operator op(const Lanes<E>& a, const Lanes<E>& b) {                                     \
    Lanes<R> out;                                                                                             \
    KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = a.part[i] op b.part[i];                      \
    return out;                                                                                               \
  }                                                                                                           \
  template <class E>                                                                                          \
  KVW_INLINE Lanes<R> operator op(const Lanes<E>& a, typename Same<E>::type b) {                              \
    Lanes<R> out;                                                                                             \
    KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = a.part[i] op b;                              \
    return out;                                                                                               \
  }
#define KVW_ARITHMETIC(op)                                                                                    \
  KVW_OPERATOR(op, E)                                                                                         \
  template <class E>                                                                                          \
  KVW_INLINE Lanes<E> operator op(typename Same<E>::type a, const Lanes<E>& b) {                              \
    Lanes<E> out;                                                                                             \
    KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = a op b.part[i];                              \
    return out;                                                                                               \
  }
KVW_ARITHMETIC(+)
KVW_ARITHMETIC(-)
KVW_ARITHMETIC(*)
KVW_ARITHMETIC(/)
KVW_ARITHMETIC(&)
KVW_ARITHMETIC(|)
KVW_ARITHMETIC(<<)
KVW_ARITHMETIC(>>)
KVW_OPERATOR(<, int32_t)
KVW_OPERATOR(<=, int32_t)
KVW_OPERATOR(>, int32_t)
KVW_OPERATOR(==, int32_t)
KVW_OPERATOR(!=, int32_t)
#undef KVW_ARITHMETIC
#undef KVW_OPERATOR

template <class E>
KVW_INLINE Lanes<E> operator-(const Lanes<E>& a) {
  Lanes<E> out;
  KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = -a.part[i];
  return out;
}
template <class E, class B>
KVW_INLINE Lanes<E>& operator+=(Lanes<E>& a, const B& b) {
  return a = a + b;
}
template <class E, class B>
KVW_INLINE Lanes<E>& operator*=(Lanes<E>& a, const B& b) {
  return a = a * b;
}
template <class E, class B>
KVW_INLINE Lanes<E>& operator|=(Lanes<E>& a, const B& b) {
  return a = a | b;
}
template <class E>
KVW_INLINE Lanes<E> select(const Lanes<int32_t>& where, const Lanes<E>& yes, const Lanes<E>& no) {
  Lanes<E> out;
  KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = where.part[i] ? yes.part[i] : no.part[i];
  return out;
}

template <class L>
KVW_INLINE L load(const void* from) {
  L v;
  KVW_UNROLL for (int i = 0; i < L::COUNT; i++) memcpy(&v.part[i], (const char*)from + i * sizeof v.part[i], sizeof v.part[i]);
  return v;
}
template <class L>
KVW_INLINE void store(void* to, const L& v) {
  KVW_UNROLL for (int i = 0; i < L::COUNT; i++) memcpy((char*)to + i * sizeof v.part[i], &v.part[i], sizeof v.part[i]);
}

typedef Lanes<float> F16;
typedef Lanes<int32_t> I16;
typedef Lanes<uint32_t> U16;

KVW_INLINE F16 to_float(const I16& x) {
  F16 out;
  KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = __builtin_convertvector(x.part[i], F16::V);
  return out;
}
// Towards zero.
KVW_INLINE I16 to_int(const F16& x) {
  I16 out;
  KVW_UNROLL for (int i = 0; i < out.COUNT; i++) out.part[i] = __builtin_convertvector(x.part[i], I16::V);
  return out;
}

// Sixteen whole numbers from memory.
#if KVW_LEVEL == 1
KVW_INLINE U16 from_bytes(const uint8_t* x) {
  return {{(U16::V)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x)),
           (U16::V)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8)))}};
}
KVW_INLINE I16 from_signed_bytes(const uint8_t* x) {
  return {{(I16::V)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)),
           (I16::V)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8)))}};
}
KVW_INLINE U16 from_words(const uint8_t* x) {
  return {{(U16::V)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)),
           (U16::V)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(x + 16)))}};
}
#elif defined(__SSE2__)
KVW_INLINE U16 from_bytes(const uint8_t* x) {
  const __m128i v = _mm_loadu_si128((const __m128i*)x), none = _mm_setzero_si128();
  const __m128i low = _mm_unpacklo_epi8(v, none), high = _mm_unpackhi_epi8(v, none);
  return {{(U16::V)_mm_unpacklo_epi16(low, none), (U16::V)_mm_unpackhi_epi16(low, none),
           (U16::V)_mm_unpacklo_epi16(high, none), (U16::V)_mm_unpackhi_epi16(high, none)}};
}
KVW_INLINE I16 from_signed_bytes(const uint8_t* x) {
  const U16 v = from_bytes(x);
  return (I16)(v << 24) >> 24;
}
KVW_INLINE U16 from_words(const uint8_t* x) {
  const __m128i low = _mm_loadu_si128((const __m128i*)x), high = _mm_loadu_si128((const __m128i*)(x + 16));
  const __m128i none = _mm_setzero_si128();
  return {{(U16::V)_mm_unpacklo_epi16(low, none), (U16::V)_mm_unpackhi_epi16(low, none),
           (U16::V)_mm_unpacklo_epi16(high, none), (U16::V)_mm_unpackhi_epi16(high, none)}};
}
#else
template <class E>
KVW_INLINE U16 widened(const uint8_t* x) {
  typedef E Narrow __attribute__((vector_size(PART * sizeof(E))));
  U16 out;
  KVW_UNROLL for (int i = 0; i < out.COUNT; i++) {
    Narrow v;
    memcpy(&v, x + i * sizeof v, sizeof v);
    out.part[i] = __builtin_convertvector(v, U16::V);
  }
  return out;
}
KVW_INLINE U16 from_bytes(const uint8_t* x) { return widened<uint8_t>(x); }
KVW_INLINE I16 from_signed_bytes(const uint8_t* x) { return (I16)(widened<uint8_t>(x) << 24) >> 24; }
KVW_INLINE U16 from_words(const uint8_t* x) { return widened<uint16_t>(x); }
#endif

// Of each lane the lowest byte.
KVW_INLINE void store_bytes(uint8_t* to, const U16& x) {
  uint32_t wide[16];
  memcpy(wide, &x, sizeof wide);
  for (int i = 0; i < 16; i++) to[i] = (uint8_t)wide[i];
}

// Lanes i and i + 8 first, then i and i + 4, and so on.
KVW_INLINE float sum(const F16& v) {
  F16::V x = KVW_LEVEL == 1 ? v.part[0] + v.part[1] : (v.part[0] + v.part[2 % F16::COUNT]) + (v.part[1] + v.part[3 % F16::COUNT]);
  float y[PART];
  memcpy(y, &x, sizeof y);
  for (int step = PART / 2; step; step /= 2)
    for (int i = 0; i < step; i++) y[i] += y[i + step];
  return y[0];
}
KVW_INLINE float largest(const F16& v) {
  float x[16];
  memcpy(x, &v, sizeof x);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
  return x[0];
}

}  // namespace
}  // namespace KVW_NS
