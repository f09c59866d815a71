// bfloat16 queries and keys by AMX: exact products, summed in float32 (the tiles read denormal numbers as zero).
//
// Keys are the left operand and lie as they are stored, 16 rows of 32 numbers to a tile; queries are packed once for
// a chunk of columns, in pairs of dimensions. While the tiles of one pair of 16 columns are multiplied, the
// exponentials of the pair before are taken.
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

// Bits of 2^(i/16), less what i itself leaves in them when n below is moved to the exponent's place.
alignas(64) const uint32_t POWERS[LANES] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// 2^x = power * rest for LEAST <= x <= 127, within 5e-7; what is less counts as LEAST, and NaN makes rest NaN. With n/16 next to x, power is
// 2^(n/16), from the table, and rest is 2^(x - n/16), from a square. A polynomial of x less an integer takes longer.
struct Exp2 {
  __m512 power, rest;

  explicit Exp2(__m512 x) {
    const __m512 round = _mm512_set1_ps(786432.0f);  // 1.5 * 2^19: adding it rounds to 1/16
    x = _mm512_max_ps(_mm512_set1_ps(LEAST), x);
    const __m512 shifted = _mm512_add_ps(x, round);
    const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, round));
    const __m512i n = _mm512_castps_si512(shifted);
    const __m512i bits = _mm512_permutexvar_epi32(n, _mm512_load_si512(POWERS));
    power = _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_slli_epi32(n, 19)));
    const __m512 slope = _mm512_fmadd_ps(_mm512_set1_ps(0.24022643f), f, _mm512_set1_ps(0.69318772f));
    rest = _mm512_fmadd_ps(slope, f, _mm512_set1_ps(1.0f));
  }
};

inline __m512 exp2_of(__m512 x) {
  const Exp2 y(x);
  return _mm512_mul_ps(y.power, y.rest);
}

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

// Takes them, some keys at a time.
template <Sight SIGHT>
struct Exponentials {
  const Pending p;
  const __m512 factor, left, right;

  Exponentials(const Pending& pending, __m512 times)
      : p(pending),
        factor(times),
        left(SIGHT == HIDDEN ? times : _mm512_load_ps(p.chunk->bias + p.column)),
        right(SIGHT == HIDDEN ? times : _mm512_load_ps(p.chunk->bias + p.column + LANES)) {}

  void take(int64_t start, int64_t stop) const {
    if (SIGHT == HIDDEN) return;
    for (int64_t i = start; i < stop; i++) {
      const float* row = p.logits + i * PAIR;
      Exp2 x(_mm512_fmadd_ps(_mm512_load_ps(row), factor, left));
      Exp2 y(_mm512_fmadd_ps(_mm512_load_ps(row + LANES), factor, right));
      if (SIGHT == MASKED) {  // power and rest of what is hidden may be no numbers
        const __mmask16 one = visible(*p.chunk, p.column, p.block->where[i]);
        const __mmask16 other = visible(*p.chunk, p.column + LANES, p.block->where[i]);
        x.power = _mm512_maskz_mov_ps(one, x.power), x.rest = _mm512_maskz_mov_ps(one, x.rest);
        y.power = _mm512_maskz_mov_ps(other, y.power), y.rest = _mm512_maskz_mov_ps(other, y.rest);
      }
      float* sum = p.sums + i * LANES;
      const __m512 more = _mm512_fmadd_ps(x.power, x.rest, _mm512_load_ps(sum));
      _mm512_store_ps(sum, _mm512_fmadd_ps(y.power, y.rest, more));
    }
  }
};

struct Kernel {
  static constexpr int CHUNK = WIDE;

  const kvw_scoring& a;
  const int64_t steps;  // tiles of one vector; the last may begin before the one before it ends
  const int64_t share;  // keys whose exponentials are taken after each of a step's four products
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
        share(parts(KEYS, 4 * steps)),
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
    const Exponentials<BEFORE> before(pending[next ^ 1], factor);
    int64_t from = 0;
    const auto take_some = [&]() __attribute__((always_inline)) {
      const int64_t to = least(from + share, KEYS);
      before.take(from, to);
      from = to;
    };
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
      take_some();
      _tile_dpbf16ps(1, 4, 7);
      take_some();
      _tile_dpbf16ps(2, 5, 6);
      take_some();
      _tile_dpbf16ps(3, 5, 7);
      take_some();
    }
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
    if (last.sight == FULL) Exponentials<FULL>(last, factor).take(0, KEYS);
    if (last.sight == MASKED) Exponentials<MASKED>(last, factor).take(0, KEYS);
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

