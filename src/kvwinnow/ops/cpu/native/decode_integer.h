// Products in whole numbers, for codes of 8 and 4 bits: what makes quantised slots as fast to read as their bytes.
//
// A query (or the weights of a block of slots) becomes fixed point of 14 bits in two bytes, high and low, and codes are
// small integers, so that AMX or VNNI products are exact; scales are applied to their sums. Vectors are read where they
// lie, row by row:
//   keys    A = 16 slots x 64 elements, B = the queries: (16 quads of elements) x (8 high, 8 low) x 4 bytes
//   values  A = the weights: (high, low of each query) x 64 slots, B = 4 slots interleaved: (16 quads of slots) x 16 x 4
// With AMX a product is one instruction; without, it is VNNI instructions on the same operands.
//
// A block goes through steps, between which others run while tiles are on their way: expand, multiply and collect for
// keys; interleave, weigh, multiply and collect for values.
#pragma once

#include "pieces.h"

#if KVW_LEVEL >= 2

namespace KVW_NS {
namespace {

using namespace kvw;

// -- keys -------------------------------------------------------------------------------------------------------------

struct IntegerKeys {
  alignas(64) int8_t query[MAX_TERMS][16][COLUMNS][4];
  alignas(64) int32_t lifted[MAX_TERMS][COLUMNS];   // what lifting by 128 adds to each product
  alignas(64) float total[MAX_GROUPS][ROWS];        // sum of a query's elements in each group, in units
  alignas(64) int8_t plain[MAX_PIECES][BLOCK][PIECE];
  alignas(64) Tile sums[MAX_TERMS][4];
  float unit[ROWS];                                 // of a row's fixed point

  void prepare(const Pieces& pieces, const float* q, int stride, int rows, int dim) {
    const int size = dim / pieces.groups;
    memset(query, 0, sizeof query[0] * pieces.terms);
    memset(lifted, 0, sizeof lifted[0] * pieces.terms);
    memset(total, 0, sizeof total[0] * pieces.groups);
    for (int r = 0; r < ROWS; r++) unit[r] = 1.0f;
    for (int r = 0; r < rows; r++) {
      const float* row = q + r * stride;
      alignas(64) int32_t fixed[MAX_DIM];
      F16 most = fill(1e-30f);
      for (int d = 0; d < dim; d += LANES) most = larger(most, larger(load<F16>(row + d), -load<F16>(row + d)));
      unit[r] = largest(most) / 8191.0f;
      const __m512 per = _mm512_set1_ps(1.0f / unit[r]);
      for (int d = 0; d < dim; d += LANES)
        _mm512_store_si512(fixed + d, _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + d), per)));
      for (int g = 0; g < pieces.groups; g++) {
        float sum = 0.0f;
        for (int d = g * size; d < (g + 1) * size; d++) sum += row[d];
        total[g][r] = sum / unit[r];
      }
      for (int k = 0; k < pieces.terms; k++) {
        const Pieces::Term& term = pieces.term[k];
        int highs = 0, lows = 0;
        for (__mmask64 left = term.where; left; left &= left - 1) {
          const int i = __builtin_ctzll(left), x = fixed[pieces.element[term.piece][i]];
          const int high = (x + 64) >> 7, low = x - high * 128;
          query[k][i / 4][r][i % 4] = (int8_t)high;
          query[k][i / 4][ROWS + r][i % 4] = (int8_t)low;
          highs += high, lows += low;
        }
        lifted[k][r] = highs * 128;
        lifted[k][ROWS + r] = lows * 128;
      }
    }
  }
};

template <int KIND>
inline bool lies_as_tiles(const Rows& x, int n) {
  return !LIFTED && KIND == INT8 && n == BLOCK && x.dim % PIECE == 0;
}

template <int KIND, Pieces::Shape SHAPE>
void expand_keys_as(const Rows& x, int n, const Pieces& pieces, IntegerKeys& keys) {
  const __m512i lift = _mm512_set1_epi8(LIFTED && Codes<KIND>::SIGNED ? -128 : 0);
  const int each = pieces.each;
  const int64_t stride = x.stride;
  for (int p = 0; p < each; p++) {
    const __mmask64 whole = pieces.whole[p];
    const uint8_t* row = x.codes + p * PIECE;
    int8_t *low = keys.plain[p][0], *high = keys.plain[each + p][0];
    for (int t = 0; t < n; t++, row += stride, low += PIECE, high += PIECE) {
      ask_for(row + BLOCK * stride);
      if constexpr (SHAPE == Pieces::BOTH) {
        const __m512i v = Codes<KIND>::both(_mm256_maskz_loadu_epi8((__mmask32)whole, row));
        _mm512_store_si512(low, _mm512_xor_si512(v, lift));
      } else if constexpr (SHAPE == Pieces::SPLIT) {
        const __m512i v = _mm512_maskz_loadu_epi8(whole, row);
        _mm512_store_si512(low, _mm512_xor_si512(Codes<KIND>::low(v), lift));
        _mm512_store_si512(high, _mm512_xor_si512(Codes<KIND>::high(v), lift));
      } else {
        _mm512_store_si512(low, _mm512_xor_si512(_mm512_maskz_loadu_epi8(whole, row), lift));
      }
    }
  }
  for (int p = 0; p < pieces.count && n < BLOCK; p++) memset(keys.plain[p][n], 0, (size_t)(BLOCK - n) * PIECE);
}

template <int KIND>
void expand_keys(const Rows& x, int n, const Pieces& pieces, IntegerKeys& keys) {
  if (lies_as_tiles<KIND>(x, n)) return;
  if constexpr (KIND == INT8) expand_keys_as<KIND, Pieces::PLAIN>(x, n, pieces, keys);
  else if (pieces.shape == Pieces::BOTH) expand_keys_as<KIND, Pieces::BOTH>(x, n, pieces, keys);
  else expand_keys_as<KIND, Pieces::SPLIT>(x, n, pieces, keys);
}

// sums[slot][column] of 16 slots each.
template <int KIND>
static void multiply_keys(const Rows& x, int n, const Pieces& pieces, IntegerKeys& keys) {
  const bool there = lies_as_tiles<KIND>(x, n);
  for (int k = 0; k < pieces.terms; k++) {
    const int piece = pieces.term[k].piece;
    const int8_t* from = there ? (const int8_t*)x.codes + piece * PIECE : keys.plain[piece][0];
    const int64_t stride = there ? x.stride : PIECE;
#if KVW_LEVEL >= 3
    _tile_loadd(3, keys.query[k], 64);
    for (int i = 0; i < 4; i += 2) {
      if (there && k == 0)
        for (int t = 16 * i; t < 16 * i + 32; t++) ask_for(x.codes + (t + BLOCK) * stride, stride);
      _tile_zero(0);
      _tile_loadd(2, from + 16 * i * stride, stride);
      _tile_dpbssd(0, 2, 3);
      _tile_zero(1);
      _tile_loadd(2, from + 16 * (i + 1) * stride, stride);
      _tile_dpbssd(1, 2, 3);
      _tile_stored(0, keys.sums[k][i], 64);
      _tile_stored(1, keys.sums[k][i + 1], 64);
    }
#else
    const __m512i start = Codes<KIND>::SIGNED ? _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_load_si512(keys.lifted[k]))
                                              : _mm512_setzero_si512();
    for (int t = 0; t < n; t += 8) {
      __m512i acc[8];
      for (int j = 0; j < 8; j++) acc[j] = start;
      for (int i = 0; i < 16; i++) {
        const __m512i query = _mm512_load_si512(keys.query[k][i]);
        for (int j = 0; j < 8; j++) {
          int32_t quad;
          memcpy(&quad, from + (t + j) * stride + 4 * i, 4);
          acc[j] = _mm512_dpbusd_epi32(acc[j], _mm512_set1_epi32(quad), query);
        }
      }
      for (int j = 0; j < 8; j++) _mm512_store_si512(keys.sums[k][t / 16][t % 16 + j], acc[j]);
    }
#endif
  }
}

// y[0..7] holds 16 slots x 8 rows, slots i and i + 4 in y[i], 8 + i and 12 + i in y[4 + i]; row r goes to to[r].
inline void turn(const __m512* y, int rows, const float* unit, float (*to)[BLOCK]) {
  __m512 u[2][4];
  for (int s = 0; s < 2; s++) {
    const __m512* z = y + 4 * s;
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(z[0], z[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(z[0], z[1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(z[2], z[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(z[2], z[3]));
    u[s][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[s][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[s][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[s][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int r = 0; r < 4 && r < rows; r++)
    _mm512_storeu_ps(to[r], _mm512_mul_ps(_mm512_shuffle_f32x4(u[0][r], u[1][r], 0x88), _mm512_set1_ps(unit[r])));
  for (int r = 4; r < rows; r++)
    _mm512_storeu_ps(to[r], _mm512_mul_ps(_mm512_shuffle_f32x4(u[0][r - 4], u[1][r - 4], 0xdd), _mm512_set1_ps(unit[r])));
}

template <int KIND>
static void collect_keys(const Rows& x, int n, const Pieces& pieces, const IntegerKeys& keys, int rows,
                         float (*logits)[BLOCK]) {
  float unit[ROWS];
  for (int r = 0; r < ROWS; r++) unit[r] = keys.unit[r] * Codes<KIND>::UNIT;
  for (int t = 0; t < n; t += 16) {
    __m256 y[16];
    for (int i = 0; i < 16; i++) y[i] = _mm256_setzero_ps();
    for (int k = 0; k < pieces.terms; k++) {
      const Pieces::Term& term = pieces.term[k];
      const float *scale = x.scales + term.group * BLOCK + t, *zero = x.zeros + term.group * BLOCK + t;
      const __m256 total = _mm256_load_ps(keys.total[term.group]);
      const int32_t(*sums)[16] = keys.sums[k][t / 16];
      const bool moved = KIND == INT4 && term.fresh;
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        const __m256i high = _mm256_load_si256((const __m256i*)sums[i]);
        const __m256i low = _mm256_load_si256((const __m256i*)(sums[i] + ROWS));
        const __m256 whole = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 7), low));
        y[i] = _mm256_fmadd_ps(whole, _mm256_set1_ps(scale[i]), y[i]);
        if (moved) y[i] = _mm256_fmadd_ps(total, _mm256_set1_ps(zero[i]), y[i]);
      }
    }
    __m512 z[8];
    for (int i = 0; i < 4; i++) {
      z[i] = _mm512_insertf32x8(_mm512_castps256_ps512(y[i]), y[i + 4], 1);
      z[4 + i] = _mm512_insertf32x8(_mm512_castps256_ps512(y[8 + i]), y[12 + i], 1);
    }
    turn(z, rows, unit, (float(*)[BLOCK])(logits[0] + t));
  }
}

// -- values -----------------------------------------------------------------------------------------------------------

struct IntegerValues {
  alignas(64) int8_t quads[MAX_PIECES][4][16][PIECE];        // 16 bytes of a piece each: (quad of slots, element, slot)
  alignas(64) int8_t weights[MAX_GROUPS][COLUMNS][PIECE];    // (group, high and low of each row, slot)
  alignas(64) Tile sums[MAX_PIECES][4];
  alignas(64) float mixed[ROWS][MAX_PIECES][4][16];          // the running output, less the zero points' part
  alignas(64) float moved[ROWS][MAX_GROUPS][16];             // and that, in 16 parts
  float unit[MAX_GROUPS][ROWS];

  void clear(const Pieces& pieces) {
    for (int r = 0; r < ROWS; r++) memset(mixed[r], 0, sizeof mixed[r][0] * pieces.count);
    for (int r = 0; r < ROWS; r++) memset(moved[r], 0, sizeof moved[r][0] * pieces.groups);
  }
  void decay(int rows, const Pieces& pieces, const float* by) {
    for (int r = 0; r < rows; r++) {
      if (by[r] == 1.0f) continue;
      for (int p = 0; p < pieces.count; p++)
        for (int j = 0; j < 4; j++) store(mixed[r][p][j], load<F16>(mixed[r][p][j]) * by[r]);
      for (int g = 0; g < pieces.groups; g++) store(moved[r][g], load<F16>(moved[r][g]) * by[r]);
    }
  }
  void write(float* out, int stride, int rows, int size, const Pieces& pieces) const {
    for (int r = 0; r < rows; r++) {
      float of_group[MAX_GROUPS];
      for (int g = 0; g < pieces.groups; g++) of_group[g] = sum(load<F16>(moved[r][g]));
      for (int p = 0; p < pieces.count; p++)
        for (int i = 0; i < PIECE; i++) {
          const int d = pieces.element[p][i];
          if (d >= 0) out[r * stride + d] = mixed[r][p][i / 16][i % 16] + of_group[d / size];
        }
    }
  }
};

// The same 64 bytes of four slots' vectors to a row of four tiles: tile j gets bytes 16 j to 16 j + 15, a slot at a time.
inline void interleave(const __m512i* v, __m512i* tiles) {
  // Dword 4 j + L goes to place j of lane L of 128 bits, whence unpacking brings it to lane L of tile j.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  __m512i w[4];
  for (int i = 0; i < 4; i++) w[i] = _mm512_permutexvar_epi32(order, v[i]);
  const __m512i a = _mm512_unpacklo_epi8(w[0], w[1]), b = _mm512_unpackhi_epi8(w[0], w[1]);
  const __m512i c = _mm512_unpacklo_epi8(w[2], w[3]), d = _mm512_unpackhi_epi8(w[2], w[3]);
  tiles[0] = _mm512_unpacklo_epi16(a, c);
  tiles[1] = _mm512_unpackhi_epi16(a, c);
  tiles[2] = _mm512_unpacklo_epi16(b, d);
  tiles[3] = _mm512_unpackhi_epi16(b, d);
}

template <int KIND, Pieces::Shape SHAPE>
void interleave_values_as(const Rows& x, int n, const Pieces& pieces, IntegerValues& values) {
  const int each = pieces.each;
  const int64_t stride = x.stride;
  for (int p = 0; p < each; p++) {
    const __mmask64 whole = pieces.whole[p];
    const uint8_t* row = x.codes + p * PIECE;
    for (int i = 0; i < 16; i++) {
      __m512i v[4];
      for (int j = 0; j < 4; j++, row += stride) {
        ask_for(row + BLOCK * stride);
        const __mmask64 there = 4 * i + j < n ? whole : 0;
        if constexpr (SHAPE == Pieces::BOTH) v[j] = Codes<KIND>::both(_mm256_maskz_loadu_epi8((__mmask32)there, row));
        else v[j] = _mm512_maskz_loadu_epi8(there, row);
      }
      __m512i tiles[4];
      interleave(v, tiles);
      for (int j = 0; j < 4; j++) {
        if constexpr (SHAPE == Pieces::SPLIT) {  // pairs of elements have stayed together until now
          _mm512_store_si512(values.quads[p][j][i], Codes<KIND>::low(tiles[j]));
          _mm512_store_si512(values.quads[each + p][j][i], Codes<KIND>::high(tiles[j]));
        } else {
          _mm512_store_si512(values.quads[p][j][i], tiles[j]);
        }
      }
    }
  }
}

template <int KIND>
void interleave_values(const Rows& x, int n, const Pieces& pieces, IntegerValues& values) {
  if constexpr (KIND == INT8) interleave_values_as<KIND, Pieces::PLAIN>(x, n, pieces, values);
  else if (pieces.shape == Pieces::BOTH) interleave_values_as<KIND, Pieces::BOTH>(x, n, pieces, values);
  else interleave_values_as<KIND, Pieces::SPLIT>(x, n, pieces, values);
}

// Weights times scales in fixed point; weights of slots beyond the block's are 0.
template <int KIND>
static void weigh_values(const Rows& x, const Pieces& pieces, const float (*weights)[BLOCK], const float* most, int rows,
                         IntegerValues& values) {
  for (int g = 0; g < pieces.groups; g++) {
    __m512 scale[4], zero[4];
    for (int i = 0; i < 4; i++) {
      scale[i] = _mm512_loadu_ps(x.scales + g * BLOCK + 16 * i);
      if (KIND == INT4) zero[i] = _mm512_loadu_ps(x.zeros + g * BLOCK + 16 * i);
    }
    const float largest =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(scale[0], scale[1]), _mm512_max_ps(scale[2], scale[3])));
    for (int r = 0; r < rows; r++) {
      // Each block has its own unit: a small weight of a long tail must not round to nothing.
      const float top = largest * most[r] > 1e-30f ? largest * most[r] : 1e-30f;
      values.unit[g][r] = top * (Codes<KIND>::UNIT / 16383.0f);
      const __m512 per = _mm512_set1_ps(16383.0f / top);
      __m512 moved = KIND == INT4 ? _mm512_load_ps(values.moved[r][g]) : _mm512_setzero_ps();
      for (int i = 0; i < 4; i++) {
        const __m512 p = _mm512_loadu_ps(weights[r] + 16 * i);
        if (KIND == INT4) moved = _mm512_fmadd_ps(p, zero[i], moved);
        const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(p, scale[i]), per));
        const __m512i low = _mm512_and_si512(fixed, _mm512_set1_epi32(127));
        _mm_store_si128((__m128i*)(values.weights[g][r] + 16 * i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 7)));
        _mm_store_si128((__m128i*)(values.weights[g][rows + r] + 16 * i), _mm512_cvtepi32_epi8(low));
      }
      if (KIND == INT4) _mm512_store_ps(values.moved[r][g], moved);
    }
  }
}

static void multiply_values(const Pieces& pieces, int rows, IntegerValues& values) {
#if KVW_LEVEL >= 3
  (void)rows;
  int loaded = -1;
#endif
  for (int p = 0; p < pieces.count; p++)
    for (int j = 0; j < 4; j++) {
      const int group = pieces.group[p][j];
      if (group < 0) continue;
#if KVW_LEVEL >= 3
      if (loaded != group) _tile_loadd(6, values.weights[group], 64);
      loaded = group;
      _tile_loadd(7, values.quads[p][j], 64);
      if (j % 2 == 0) {
        _tile_zero(4);
        _tile_dpbssd(4, 6, 7);
        _tile_stored(4, values.sums[p][j], 64);
      } else {
        _tile_zero(5);
        _tile_dpbssd(5, 6, 7);
        _tile_stored(5, values.sums[p][j], 64);
      }
#else
      for (int r = 0; r < rows; r++) {
        __m512i a = _mm512_setzero_si512(), b = a;
        for (int i = 0; i < 16; i++) {
          const __m512i v = _mm512_load_si512(values.quads[p][j][i]);
          int32_t high, low;
          memcpy(&high, values.weights[group][r] + 4 * i, 4);
          memcpy(&low, values.weights[group][rows + r] + 4 * i, 4);
          a = _mm512_dpbusd_epi32(a, _mm512_set1_epi32(high), v);
          b = _mm512_dpbusd_epi32(b, _mm512_set1_epi32(low), v);
        }
        _mm512_store_si512(values.sums[p][j][r], a);
        _mm512_store_si512(values.sums[p][j][rows + r], b);
      }
#endif
    }
}

static void collect_values(const Pieces& pieces, int rows, IntegerValues& values) {
  for (int p = 0; p < pieces.count; p++)
    for (int j = 0; j < 4; j++) {
      const int group = pieces.group[p][j];
      if (group < 0) continue;
      for (int r = 0; r < rows; r++) {
        const __m512i high = _mm512_load_si512(values.sums[p][j][r]), low = _mm512_load_si512(values.sums[p][j][rows + r]);
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
        float* to = values.mixed[r][p][j];
        _mm512_store_ps(to, _mm512_fmadd_ps(whole, _mm512_set1_ps(values.unit[group][r]), _mm512_load_ps(to)));
      }
    }
}

}  // namespace
}  // namespace KVW_NS

#endif
