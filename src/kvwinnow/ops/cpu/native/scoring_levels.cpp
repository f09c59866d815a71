// Prefill scoring in vectors of floats, whatever their width: WIDTH floats at once, in GCC's and clang's vector
// extensions. Inputs are widened to float32 exactly; products are summed in float32.

#include "scoring.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if KVW_LEVEL >= 1
#include <immintrin.h>
#endif

namespace KVW_NS {
namespace {

#include "scoring_driver.h"

// 128 bits are what SSE2 and NEON have, and what compilers emulate elsewhere.
constexpr int WIDTH = KVW_LEVEL >= KVW_AVX512 ? 16 : KVW_LEVEL == KVW_AVX2 ? 8 : 4;
typedef float floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ints __attribute__((vector_size(WIDTH * 4)));

inline floats load(const float* from) {
  floats x;
  memcpy(&x, from, sizeof x);
  return x;
}
inline ints load(const int32_t* from) {
  ints x;
  memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, floats x) { memcpy(to, &x, sizeof x); }
inline floats all(float x) { return floats{} + x; }
inline ints all(int32_t x) { return ints{} + x; }

// a * b + c, rounded once where the machine can: the same everywhere in a level, so that equal keys tie.
inline floats fma(floats a, floats b, floats c) {
#if KVW_LEVEL >= 2
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KVW_LEVEL == 1
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline floats larger(floats a, floats b) { return a > b ? a : b; }

// 2^x within 2e-7 for LEAST <= x <= 127; what is less counts as LEAST, and NaN stays NaN.
inline floats exp2_of(floats x) {
  // 1.5 * 2^23: adding it rounds to an integer, in the low bits. 127 more make that the exponent of a float.
  const floats round = all(12582912.0f + 127.0f);
  x = larger(all(LEAST), x);
  const floats shifted = x + round, f = x - (shifted - round);
  floats p = all(1.32764e-3f);
  p = fma(p, f, all(9.675541e-3f));
  p = fma(p, f, all(5.550713e-2f));
  p = fma(p, f, all(2.4022120e-1f));
  p = fma(p, f, all(6.9314697e-1f));
  p = fma(p, f, all(1.0000001f));
  return p * (floats)((ints)shifted << 23);
}

// tanh x within 2e-7.
inline floats tanh_of(floats x) {
  const floats e = exp2_of(larger(x, -x) * all(-2.0f * LOG2E)), y = (all(1.0f) - e) / (all(1.0f) + e);
  return x < all(0.0f) ? -y : y;
}

inline float from_half(uint16_t h) {
  // The exponent is rebased by a product, which is exact for denormal numbers too.
  uint32_t bits = (h & 0x7fffu) << 13;
  float x;
  memcpy(&x, &bits, 4);
  x *= 0x1p112f;
  memcpy(&bits, &x, 4);
  if ((h & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
  bits |= (h & 0x8000u) << 16;
  memcpy(&x, &bits, 4);
  return x;
}

inline float from_bfloat16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// One vector of dim numbers as float32.
void widen(const char* from, int32_t dtype, int64_t dim, float* to) {
  if (dtype == KVW_FLOAT32) {
    memcpy(to, from, static_cast<size_t>(dim) * 4);
    return;
  }
  uint16_t half[LANES];
  for (int64_t d = 0; d < dim; d += LANES) {
    memcpy(half, from + d * 2, sizeof half);
    if (dtype == KVW_BFLOAT16) {
      for (int j = 0; j < LANES; j++) to[d + j] = from_bfloat16(half[j]);
    } else {
#if KVW_LEVEL >= 1
      for (int j = 0; j < LANES; j += 8)
        _mm256_storeu_ps(to + d + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i*>(half + j))));
#else
      for (int j = 0; j < LANES; j++) to[d + j] = from_half(half[j]);
#endif
    }
  }
}

struct Kernel {
  static constexpr int CHUNK = 64;
  static constexpr int SPAN = WIDTH >= 8 ? PAIR : LANES;  // columns that share one reading of the keys
  static constexpr int VECTORS = SPAN / WIDTH;
  static constexpr int ROWS = WIDTH == 16 ? 8 : 2;  // keys at once: as many sums as registers hold

  const kvw_scoring& a;
  float* queries;  // for each chunk, SPAN columns at a time, (dim, SPAN)
  float* keys;     // (KEYS, dim)
  float* logits;   // (KEYS, PAIR), before anything is added
  float factor;    // on a product, to give log2(e) * logit

  static int64_t bytes(const kvw_scoring& a, int64_t turns) {
    return Arena::room<float>(turns * CHUNK * a.dim) + Arena::room<float>(KEYS * a.dim) +
           Arena::room<float>(KEYS * PAIR);
  }

  Kernel(const kvw_scoring& args, Arena& arena, int64_t turns)
      : a(args),
        queries(arena.take<float>(turns * CHUNK * args.dim)),
        keys(arena.take<float>(KEYS * args.dim)),
        logits(arena.take<float>(KEYS * PAIR)),
        factor(args.softcap > 0.0f ? 1.0f : args.scale * LOG2E) {}

  void pack(const Columns<CHUNK>& chunk, int turn) {
    float* row = keys;  // not in use yet
    for (int j = 0; j < chunk.pairs * PAIR; j++) {
      if (chunk.query[j] == nullptr) {
        memset(row, 0, static_cast<size_t>(a.dim) * 4);
      } else {
        widen(chunk.query[j], a.q_dtype, a.dim, row);
      }
      float* to = queries + (turn * CHUNK + j / SPAN * SPAN) * a.dim + j % SPAN;
      for (int64_t d = 0; d < a.dim; d++) to[d * SPAN] = row[d];
    }
  }

  void read(const char* rows, int64_t stride) {
    for (int i = 0; i < KEYS; i++) widen(rows + i * stride, a.k_dtype, a.dim, keys + i * a.dim);
  }

  void multiply(const Columns<CHUNK>& chunk, int turn, int pair) {
    for (int half = 0; half < PAIR; half += SPAN) {
      const float* q = queries + (turn * CHUNK + pair * PAIR + half) * a.dim;
      for (int i = 0; i < KEYS; i += ROWS) {
        floats sums[ROWS][VECTORS] = {};
        for (int64_t d = 0; d < a.dim; d++) {
          floats x[VECTORS];
          for (int v = 0; v < VECTORS; v++) x[v] = load(q + d * SPAN + v * WIDTH);
          for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
              sums[r][v] = fma(x[v], all(keys[(i + r) * a.dim + d]), sums[r][v]);
        }
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < VECTORS; v++)
            store(logits + (i + r) * PAIR + half + v * WIDTH, sums[r][v]);
      }
    }
    if (a.softcap > 0.0f) cap(chunk, pair);
  }

  void cap(const Columns<CHUNK>& chunk, int pair) {
    const floats inner = all(a.scale / a.softcap), outer = all(a.softcap * LOG2E), one = all(1.0f / a.softcap);
    for (int i = 0; i < KEYS; i++) {
      for (int j = 0; j < PAIR; j += WIDTH) {
        float* at = logits + i * PAIR + j;
        store(at, tanh_of(fma(load(at), inner, load(chunk.shift + pair * PAIR + j) * one)) * outer);
      }
    }
  }

  // Where lanes are of columns that see the key.
  ints visible(const Columns<CHUNK>& chunk, int column, const KeyBlock& block, int i) const {
    const ints where = all(block.where[i]);
    return (load(chunk.last + column) >= where) & (load(chunk.before + column) < where);
  }

  void add_sums(const Columns<CHUNK>& chunk, const KeyBlock& block, const char* rows, int64_t stride, float* sums) {
    bool ready = false;
    for (int pair = 0; pair < chunk.pairs; pair++) {
      if (chunk.sight(pair, block) == HIDDEN) continue;
      if (!ready) read(rows, stride);
      ready = true;
      multiply(chunk, 0, pair);
      const floats times = all(factor);
      for (int j = 0; j < PAIR; j += WIDTH) {
        const int column = pair * PAIR + j;
        const floats bias = load(chunk.bias + column);
        for (int i = 0; i < KEYS; i++) {
          const floats weight = exp2_of(fma(load(logits + i * PAIR + j), times, bias));
          float* sum = sums + i * LANES + j % LANES;
          store(sum, load(sum) + (floats)((ints)weight & visible(chunk, column, block, i)));
        }
      }
    }
  }

  void finish_sums() {}

  void add_tops(const Columns<CHUNK>& chunk, int turn, const KeyBlock& block, const char* rows, int64_t stride,
         Tops<CHUNK>& tops) {
    bool ready = false;
    for (int pair = 0; pair < chunk.pairs; pair++) {
      if (chunk.sight(pair, block) == HIDDEN) continue;
      if (!ready) read(rows, stride);
      ready = true;
      multiply(chunk, turn, pair);
      const floats times = all(factor);
      for (int j = 0; j < PAIR; j += WIDTH) {
        const int column = pair * PAIR + j;
        const floats bias = load(chunk.bias + column), old = load(tops.top + column);
        floats top = old;
        for (int i = 0; i < KEYS; i++) {
          const floats x = fma(load(logits + i * PAIR + j), times, bias);
          top = larger(top, visible(chunk, column, block, i) ? x : all(LOWEST));
        }
        floats sum = load(tops.sum + column) * exp2_of(old - top);
        for (int i = 0; i < KEYS; i++) {
          const floats x = exp2_of(fma(load(logits + i * PAIR + j), times, bias) - top);
          sum += (floats)((ints)x & visible(chunk, column, block, i));
        }
        store(tops.top + column, top);
        store(tops.sum + column, sum);
      }
    }
  }
};

}  // namespace

int32_t column_sums(const kvw_scoring& args) { return run_column_sums<Kernel>(args); }

int32_t log_sum_exp(const kvw_scoring& args) { return run_log_sum_exp<Kernel>(args); }

}  // namespace KVW_NS
