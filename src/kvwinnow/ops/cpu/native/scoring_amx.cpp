// bfloat16 queries and keys by AMX: exact products, summed in float32 (the tiles read denormal numbers as zero).
//
// Keys are the left operand and lie as they are stored, 16 rows of 32 numbers to a tile; queries are packed once for
// a chunk of columns, in pairs of dimensions. While the tiles of one pair of 16 columns are multiplied, the
// exponentials of the pair before are taken: they stand behind the products in the program, and the processor begins
// them early. As long as a product is on its way one of its two units for 512 bits adds and shuffles only.
#include "scoring.h"

// gcc 12 warns of its own header where it means a register whatever it holds (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace KVW_NS {
namespace {

#include "scoring_driver.h"

constexpr int STEP = 32;             // dimensions of one tile
constexpr int TILE = LANES * LANES;  // 32-bit words of one tile

struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Polynomials that are 2^f for 0 <= f < 1, from the highest power on: within 2e-7, and for weights within 3e-6, which is as much
// as a log-sum-exp around 10 is off in float32.
constexpr float CLOSE[] = {1.87757659e-03f, 8.98934029e-03f, 5.58263179e-02f, 2.40153617e-01f, 6.93153073e-01f, 9.99999925e-01f};
constexpr float SHORT[] = {1.3534167e-2f, 5.2011464e-2f, 2.4144276e-1f, 6.9300383e-1f, 1.0000026f};

// 2^x; NaN stays NaN. What is less than 2^LEAST is nothing, since a denormal result would take hundreds of cycles.
template <int COUNT>
inline __m512 exp2_by(const float (&factors)[COUNT], __m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x less the integer below it
  __m512 p = _mm512_set1_ps(factors[0]);
  for (int i = 1; i < COUNT; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(factors[i]));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(LEAST), _CMP_NLT_UQ), p, x);
}
inline __m512 exp2_of(__m512 x) { return exp2_by(CLOSE, x); }
inline __m512 weight_of(__m512 x) { return exp2_by(SHORT, x); }

// tanh x within 5e-7.
inline __m512 tanh_of(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
  const __m512 e = exp2_of(_mm512_mul_ps(_mm512_andnot_ps(sign, x), _mm512_set1_ps(-2.0f * LOG2E)));
  const __m512 y = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  return _mm512_or_ps(y, _mm512_and_ps(sign, x));
}

// 16 rows of 16 words each, turned.
inline void transpose(__m512i* r) {
  __m512i t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

constexpr int WIDE = 96;  // columns of a chunk: their queries fit into the first-level cache beside a block of keys

// Which of 16 columns see a key.
inline __mmask16 visible(const Columns<WIDE>& chunk, int column, int32_t where) {
  const __m512i key = _mm512_set1_epi32(where);
  const __mmask16 old = _mm512_cmpge_epi32_mask(_mm512_load_si512(chunk.last + column), key);
  return _mm512_mask_cmplt_epi32_mask(old, _mm512_load_si512(chunk.before + column), key);
}

// A product of KEYS keys and PAIR columns whose exponentials are still to be taken.
struct Pending {
  const float* logits;
  const Columns<WIDE>* chunk;
  const KeyBlock* block;
  float* sums;
  int column;
  Sight sight = HIDDEN;
};

// Takes them, and adds them to the sums of their keys.
template <Sight SIGHT>
inline void take(const Pending& p, __m512 factor) {
  if (SIGHT == HIDDEN) return;
  const float* row = p.logits;
  float* sum = p.sums;
  const __m512 left = _mm512_load_ps(p.chunk->bias + p.column);
  const __m512 right = _mm512_load_ps(p.chunk->bias + p.column + LANES);
#pragma GCC unroll 4
  for (int i = 0; i < KEYS; i++, row += PAIR, sum += LANES) {
    __m512 x = weight_of(_mm512_fmadd_ps(_mm512_load_ps(row), factor, left));
    __m512 y = weight_of(_mm512_fmadd_ps(_mm512_load_ps(row + LANES), factor, right));
    if (SIGHT == MASKED) {
      x = _mm512_maskz_mov_ps(visible(*p.chunk, p.column, p.block->where[i]), x);
      y = _mm512_maskz_mov_ps(visible(*p.chunk, p.column + LANES, p.block->where[i]), y);
    }
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_add_ps(_mm512_load_ps(sum), x), y));
  }
}

struct Kernel {
  static constexpr int CHUNK = WIDE;

  const kvw_scoring& a;
  const int64_t steps;  // tiles of one vector; the last may begin before the one before it ends
  uint32_t* queries;    // for each chunk, 16 columns and step a tile: (dimension pairs, columns)
  float* logits;        // 2 x (KEYS, PAIR), before anything is added
  const __m512 factor;  // on a product, to give log2(e) * logit
  Pending pending[2];   // of which the next one's logits lie at the same place
  int next = 0;

  static int64_t bytes(const kvw_scoring& a, int64_t turns) {
    return Arena::room<uint32_t>(turns * CHUNK * parts(a.dim, STEP) * LANES) + Arena::room<float>(2 * KEYS * PAIR);
  }

  Kernel(const kvw_scoring& args, Arena& arena, int64_t turns)
      : a(args),
        steps(parts(args.dim, STEP)),
        queries(arena.take<uint32_t>(turns * CHUNK * steps * LANES)),
        logits(arena.take<float>(2 * KEYS * PAIR)),
        factor(_mm512_set1_ps(args.softcap > 0.0f ? 1.0f : args.scale * LOG2E)) {
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.bytes[i] = 64;
      config.rows[i] = LANES;
    }
    _tile_loadconfig(&config);
  }

  ~Kernel() { _tile_release(); }

  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  int64_t offset(int64_t step) const { return least(step * STEP, a.dim - STEP); }

  void pack(const Columns<CHUNK>& chunk, int turn) {
    uint32_t* to = queries + turn * CHUNK * steps * LANES;
    for (int j = 0; j < chunk.pairs * PAIR; j += LANES) {
      for (int64_t step = 0; step < steps; step++, to += TILE) {
        // Of a last tile that begins early, what the one before it has counted is zero here.
        const int64_t twice = step * STEP - offset(step);
        const __mmask16 once = static_cast<__mmask16>(0xffffu << (twice / 2));
        __m512i rows[LANES];
        for (int i = 0; i < LANES; i++) {
          const char* query = chunk.query[j + i];
          rows[i] = query == nullptr ? _mm512_setzero_si512()
                                     : _mm512_maskz_loadu_epi32(once, query + offset(step) * 2);
        }
        transpose(rows);
        for (int i = 0; i < LANES; i++) _mm512_store_si512(to + i * LANES, rows[i]);
      }
    }
  }

  // Multiplies KEYS keys and one pair of columns, and meanwhile takes the exponentials of the pair before.
  template <Sight BEFORE>
  float* multiply(const Columns<CHUNK>& chunk, int turn, int pair, const char* rows, int64_t stride) {
    const uint32_t* left = queries + (turn * CHUNK + pair * PAIR) * steps * LANES;
    const uint32_t* right = left + steps * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
      const char* keys = rows + offset(step) * 2;
      _tile_loadd(4, keys, stride);
      _tile_loadd(5, keys + LANES * stride, stride);
      _tile_loadd(6, left + step * TILE, 64);
      _tile_loadd(7, right + step * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    take<BEFORE>(pending[next ^ 1], factor);
    float* to = logits + next * KEYS * PAIR;
    next ^= 1;
    _tile_stored(0, to, PAIR * 4);
    _tile_stored(1, to + LANES, PAIR * 4);
    _tile_stored(2, to + LANES * PAIR, PAIR * 4);
    _tile_stored(3, to + LANES * PAIR + LANES, PAIR * 4);
    if (a.softcap > 0.0f) cap(chunk, pair, to);
    return to;
  }

  float* multiply_after(Sight before, const Columns<CHUNK>& chunk, int pair, const char* rows, int64_t stride) {
    switch (before) {
      case FULL:
        return multiply<FULL>(chunk, 0, pair, rows, stride);
      case MASKED:
        return multiply<MASKED>(chunk, 0, pair, rows, stride);
      default:
        return multiply<HIDDEN>(chunk, 0, pair, rows, stride);
    }
  }

  void cap(const Columns<CHUNK>& chunk, int pair, float* at) const {
    const __m512 inner = _mm512_set1_ps(a.scale / a.softcap), one = _mm512_set1_ps(1.0f / a.softcap);
    const __m512 outer = _mm512_set1_ps(a.softcap * LOG2E);
    for (int i = 0; i < KEYS; i++) {
      for (int j = 0; j < PAIR; j += LANES, at += LANES) {
        const __m512 moved = _mm512_mul_ps(_mm512_load_ps(chunk.shift + pair * PAIR + j), one);
        const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(at), inner, moved);
        _mm512_store_ps(at, _mm512_mul_ps(tanh_of(x), outer));
      }
    }
  }

  void add_sums(const Columns<CHUNK>& chunk, const KeyBlock& block, const char* rows, int64_t stride, float* sums) {
    for (int pair = 0; pair < chunk.pairs; pair++) {
      const Sight sight = chunk.sight(pair, block);
      if (sight == HIDDEN) continue;
      Pending& now = pending[next];
      now.logits = multiply_after(pending[next ^ 1].sight, chunk, pair, rows, stride);
      now.chunk = &chunk;
      now.block = &block;
      now.sums = sums;
      now.column = pair * PAIR;
      now.sight = sight;
    }
  }

  void finish_sums() {
    Pending& last = pending[next ^ 1];
    if (last.sight == FULL) take<FULL>(last, factor);
    if (last.sight == MASKED) take<MASKED>(last, factor);
    last.sight = HIDDEN;
  }

  void add_tops(const Columns<CHUNK>& chunk, int turn, const KeyBlock& block, const char* rows, int64_t stride,
                Tops<CHUNK>& tops) {
    for (int pair = 0; pair < chunk.pairs; pair++) {
      const Sight sight = chunk.sight(pair, block);
      if (sight == HIDDEN) continue;
      const float* made = multiply<HIDDEN>(chunk, turn, pair, rows, stride);
      for (int j = 0; j < PAIR; j += LANES) raise_tops(chunk, block, made + j, pair * PAIR + j, sight, tops);
    }
  }

  void raise_tops(const Columns<CHUNK>& chunk, const KeyBlock& block, const float* made, int column, Sight sight,
          Tops<CHUNK>& tops) const {
    const __m512 bias = _mm512_load_ps(chunk.bias + column), old = _mm512_load_ps(tops.top + column);
    __mmask16 seen[KEYS];
    __m512 first = _mm512_set1_ps(LOWEST), second = first;
    for (int i = 0; i < KEYS; i += 2) {
      seen[i] = sight == FULL ? 0xffff : visible(chunk, column, block.where[i]);
      seen[i + 1] = sight == FULL ? 0xffff : visible(chunk, column, block.where[i + 1]);
      first = _mm512_mask_max_ps(first, seen[i], first, _mm512_load_ps(made + i * PAIR));
      second = _mm512_mask_max_ps(second, seen[i + 1], second, _mm512_load_ps(made + (i + 1) * PAIR));
    }
    first = _mm512_max_ps(first, second);
    const __mmask16 any = _mm512_cmp_ps_mask(first, _mm512_set1_ps(LOWEST), _CMP_GT_OQ);
    const __m512 top = _mm512_mask_max_ps(old, any, old, _mm512_fmadd_ps(first, factor, bias));
    const __m512 apart = _mm512_sub_ps(bias, top);
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(tops.sum + column), exp2_of(_mm512_sub_ps(old, top)));
    __m512 other = _mm512_setzero_ps();
    for (int i = 0; i < KEYS; i += 2) {
      const __m512 x = exp2_of(_mm512_fmadd_ps(_mm512_load_ps(made + i * PAIR), factor, apart));
      const __m512 y = exp2_of(_mm512_fmadd_ps(_mm512_load_ps(made + (i + 1) * PAIR), factor, apart));
      sum = _mm512_mask_add_ps(sum, seen[i], sum, x);
      other = _mm512_mask_add_ps(other, seen[i + 1], other, y);
    }
    _mm512_store_ps(tops.top + column, top);
    _mm512_store_ps(tops.sum + column, _mm512_add_ps(sum, other));
  }
};

}  // namespace

int32_t tile_column_sums(const kvw_scoring& args) { return run_column_sums<Kernel>(args); }

int32_t tile_log_sum_exp(const kvw_scoring& args) { return run_log_sum_exp<Kernel>(args); }

}  // namespace KVW_NS

