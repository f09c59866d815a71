// Products of float32 queries with stored vectors of any kind, decoded in registers: exact for unquantised storage.
#pragma once

#include "decode.h"
#include "lanes.h"

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr int AHEAD = 2;  // blocks

// A block of slots of one KV head: vectors one behind the other, and their scales decoded.
struct Rows {
  int kind;
  const uint8_t* codes;
  int64_t stride;       // bytes of a vector
  int dim, group, groups;
  const float* scales;  // (groups, BLOCK)
  const float* zeros;   // (groups, BLOCK), INT4 only

  const uint8_t* later;  // the block AHEAD of this one
  uint32_t size;         // and its bytes

  // Later blocks are brought to the second cache while this one is computed with, some lines in each step: memory is slow
  // to answer and takes only so many questions at once. ``part`` of ``parts``, a power of two.
  inline void ask(int part, int parts) const {
    const uint32_t from = size * (uint32_t)part / (uint32_t)parts & ~63u, to = size * (uint32_t)(part + 1) / (uint32_t)parts;
    for (uint32_t at = from; at < to; at += 64) __builtin_prefetch(later + at, 0, 2);
  }
};

// Elements d to d + 15 of a vector, as stored; d + 15 lies in the same half as d for two elements a byte, or wraps.
template <int KIND>
KVW_INLINE F16 codes_at(const uint8_t* row, int d, int dim) {
  if constexpr (KIND == FLOAT32) return load<F16>(row + 4 * d);
  if constexpr (KIND == BFLOAT16) return from_bfloat16(row + 2 * d);
  if constexpr (KIND == FLOAT16) return from_float16(row + 2 * d);
  if constexpr (KIND == INT8) return from_int8(row + d);
  if constexpr (KIND == FP8) return from_e4m3(row + d);
  if constexpr (KIND == INT4 || KIND == FP4_NV || KIND == FP4_MX) {
    const int half = dim / 2;
    U16 c;
    if (d + LANES <= half) {
      c = from_bytes(row + d) & 15;
    } else if (d >= half) {
      c = from_bytes(row + d - half) >> 4;
    } else {  // half is 8 more than a multiple of 16
      uint32_t both[LANES];
      for (int i = 0; i < LANES; i++) both[i] = d + i < half ? row[d + i] & 15 : row[d + i - half] >> 4;
      c = load<U16>(both);
    }
    if constexpr (KIND == INT4) return to_float((I16)c);
    return from_e2m1(c);
  }
}

template <int KIND>
constexpr bool scaled = KIND >= INT8;

// Of sixteen elements from a multiple of sixteen on: the group of the first, and how many of them lie in it; the others
// lie in the next one. Found once for many slots: a division takes as long as all else that is done for sixteen elements.
struct Groups {
  int first[MAX_DIM / LANES], own[MAX_DIM / LANES];
  explicit Groups(const Rows& x) {
    for (int i = 0; i < x.dim / LANES; i++) {
      first[i] = x.group ? i * LANES / x.group : 0;
      own[i] = x.group ? (first[i] + 1) * x.group - i * LANES : LANES;
    }
  }
};

// A slot's number per group, spread over the elements d to d + 15, which lie in two groups at most.
KVW_INLINE F16 spread(const float* of, const Groups& groups, int d) {
  of += groups.first[d / LANES] * BLOCK;
  const int own = groups.own[d / LANES];
  if (own >= LANES) return fill(of[0]);
  static const int32_t index[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select(load<I16>(index) < own, fill(of[0]), fill(of[BLOCK]));
}

template <int KIND>
KVW_INLINE F16 elements(const Rows& x, const Groups& groups, int slot, int d) {
  F16 v = codes_at<KIND>(x.codes + slot * x.stride, d, x.dim);
  if constexpr (scaled<KIND>) {
    v *= spread(x.scales + slot, groups, d);
    if constexpr (KIND == INT4) v += spread(x.zeros + slot, groups, d);
  }
  return v;
}

// logits[r][t] = q[r] . vector t, for R queries, each padded to dim; t < n.
template <int KIND, int R>
static void products(const Rows& x, int n, const float* q, int q_stride, float (*logits)[BLOCK]) {
  constexpr int T = ALL / R > 0 ? ALL / R : 1;
  const Groups groups(x);
  for (int t = 0; t < n; t += T) {
    F16 acc[LANES] = {};
    int slot[T];
    KVW_UNROLL for (int i = 0; i < T; i++) {
      slot[i] = t + i < n ? t + i : n - 1;
      // The block after this one, while this one is computed with.
      const uint8_t* ahead = x.codes + (slot[i] + BLOCK) * x.stride;
      for (int64_t byte = 0; byte < x.stride; byte += 64) __builtin_prefetch(ahead + byte);
    }
    for (int d = 0; d < x.dim; d += LANES) {
      F16 v[T];
      KVW_UNROLL for (int i = 0; i < T; i++) v[i] = elements<KIND>(x, groups, slot[i], d);
      KVW_UNROLL for (int r = 0; r < R; r++) {
        const F16 query = load<F16>(q + r * q_stride + d);
        KVW_UNROLL for (int i = 0; i < T; i++) acc[r * T + i] += v[i] * query;
      }
    }
#if KVW_LEVEL >= 2
    if constexpr (R * T == LANES) {
      float row[LANES];
      store(row, sums(acc));
      KVW_UNROLL for (int r = 0; r < R; r++)
        KVW_UNROLL for (int i = 0; i < T; i++) logits[r][t + i] = row[r * T + i];
      continue;
    }
#endif
    KVW_UNROLL for (int r = 0; r < R; r++)
      KVW_UNROLL for (int i = 0; i < T; i++) logits[r][t + i] = sum(acc[r * T + i]);
  }
}

// out[r] += sum over t < n of weights[r][t] vector t.
template <int KIND, int R>
static void mixture(const Rows& x, int n, const float (*weights)[BLOCK], float* out, int stride) {
  constexpr int W = ALL / R > 0 ? (ALL / R > 8 ? 8 : ALL / R) : 1;
  const Groups groups(x);
  for (int d = 0; d < x.dim; d += W * LANES) {
    const int width = (x.dim - d) / LANES;
    F16 acc[R][W];
    KVW_UNROLL for (int r = 0; r < R; r++)
      KVW_UNROLL for (int w = 0; w < W; w++)
        acc[r][w] = w < width ? load<F16>(out + r * stride + d + w * LANES) : F16{};
    if (width >= W) {
      for (int t = 0; t < n; t++) {
        const uint8_t* ahead = x.codes + (t + BLOCK) * x.stride;
        const int64_t bytes = x.stride * W * LANES / x.dim;
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead + x.stride * d / x.dim + byte);
        KVW_UNROLL for (int w = 0; w < W; w++) {
          const F16 v = elements<KIND>(x, groups, t, d + w * LANES);
          KVW_UNROLL for (int r = 0; r < R; r++) acc[r][w] += v * weights[r][t];
        }
      }
    } else {
      for (int t = 0; t < n; t++)
        KVW_UNROLL for (int w = 0; w < width; w++) {
          const F16 v = elements<KIND>(x, groups, t, d + w * LANES);
          KVW_UNROLL for (int r = 0; r < R; r++) acc[r][w] += v * weights[r][t];
        }
    }
    KVW_UNROLL for (int r = 0; r < R; r++)
      KVW_UNROLL for (int w = 0; w < W && w < width; w++) store(out + r * stride + d + w * LANES, acc[r][w]);
  }
}

typedef void (*Products)(const Rows&, int, const float*, int, float (*)[BLOCK]);
typedef void (*Mixture)(const Rows&, int, const float (*)[BLOCK], float*, int);

// Rows that are computed with for so many.
inline int padded(int rows) { return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

template <int KIND>
static Products products_for(int rows) {
  return rows <= 1 ? products<KIND, 1> : rows <= 2 ? products<KIND, 2> : rows <= 4 ? products<KIND, 4> : products<KIND, 8>;
}
template <int KIND>
static Mixture mixture_for(int rows) {
  return rows <= 1 ? mixture<KIND, 1> : rows <= 2 ? mixture<KIND, 2> : rows <= 4 ? mixture<KIND, 4> : mixture<KIND, 8>;
}

#define KVW_BY_KIND(kind, function, rows)               \
  switch (kind) {                                       \
    case FLOAT32: return function<FLOAT32>(rows);       \
    case BFLOAT16: return function<BFLOAT16>(rows);     \
    case FLOAT16: return function<FLOAT16>(rows);       \
    case INT8: return function<INT8>(rows);             \
    case INT4: return function<INT4>(rows);             \
    case FP8: return function<FP8>(rows);               \
    case FP4_NV: return function<FP4_NV>(rows);         \
    default: return function<FP4_MX>(rows);             \
  }
inline Products find_products(int kind, int rows) { KVW_BY_KIND(kind, products_for, rows) }
inline Mixture find_mixture(int kind, int rows) { KVW_BY_KIND(kind, mixture_for, rows) }
#undef KVW_BY_KIND

}  // namespace
}  // namespace KVW_NS
