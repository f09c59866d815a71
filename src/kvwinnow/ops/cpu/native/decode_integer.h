// Products in whole numbers, for codes of 8 and 4 bits: what makes quantised slots as fast to read as their bytes.
//
// A query, or the weights of a block of slots, becomes fixed point of 24 bits in three bytes, as many as a float has, and
// codes are small integers, so that AMX or VNNI products are exact; scales are applied to their sums. Four queries share
// a tile. Vectors are read where they lie, row by row:
//   keys    A = 16 slots x 64 elements, B = the queries: (16 quads of elements) x (three bytes of each query) x 4
//   values  A = the weights: (three bytes of each query) x 64 slots, B = 4 slots interleaved: (16 quads of slots) x 16 x 4
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

constexpr int PLANES = 3;  // bytes of fixed point, from the highest on
constexpr int SHARE = 4;   // queries in a tile
constexpr int SHARES = ROWS / SHARE;

inline int share_of(int rows) { return rows < SHARE ? rows : SHARE; }
inline int shares_of(int rows) { return (rows + SHARE - 1) / SHARE; }

// -- keys -------------------------------------------------------------------------------------------------------------

constexpr float FULL_QUERY = 8323000.0f;  // what three signed bytes hold, less what rounding may add

struct IntegerKeys {
  alignas(64) int8_t query[SHARES][MAX_TERMS][16][16][4];  // (quad of elements, byte and row, element)
  alignas(64) int32_t lifted[SHARES][MAX_TERMS][16];       // what lifting by 128 adds to each product
  alignas(64) float total[SHARES][MAX_GROUPS][SHARE];      // sum of a query's elements in each group, in units
  alignas(64) int8_t plain[MAX_PIECES][BLOCK][PIECE];
  alignas(64) Tile sums[SHARES][MAX_TERMS][4];
  float unit[ROWS];                                        // of a row's fixed point

  void prepare(const Pieces& pieces, const float* q, int stride, int rows, int dim) {
    const int size = dim / pieces.groups;
    for (int s = 0; s < shares_of(rows); s++) {
      memset(query[s], 0, sizeof query[s][0] * pieces.terms);
      memset(lifted[s], 0, sizeof lifted[s][0] * pieces.terms);
      memset(total[s], 0, sizeof total[s][0] * pieces.groups);
    }
    for (int r = 0; r < rows; r++) {
      const float* row = q + r * stride;
      const int share = r / SHARE, column = r % SHARE;
      alignas(64) int32_t fixed[MAX_DIM];
      F16 most = fill(1e-30f), nothing = F16{};
      for (int d = 0; d < dim; d += LANES) {
        const F16 x = load<F16>(row + d);
        most = larger(most, larger(x, -x));
        nothing += x * 0.0f;
      }
      // Fixed point knows neither NaN nor infinity: the unit carries them into every product.
      unit[r] = largest(most) / FULL_QUERY + sum(nothing);
      const __m512 per = _mm512_set1_ps(1.0f / unit[r]);
      for (int d = 0; d < dim; d += LANES)
        _mm512_store_si512(fixed + d, _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + d), per)));
      for (int g = 0; g < pieces.groups; g++) {
        float sum = 0.0f;
        for (int d = g * size; d < (g + 1) * size; d++) sum += row[d];
        total[share][g][column] = sum / unit[r];
      }
      for (int k = 0; k < pieces.terms; k++) {
        const Pieces::Term& term = pieces.term[k];
        int sums_of[PLANES] = {};
        for (__mmask64 left = term.where; left; left &= left - 1) {
          const int i = __builtin_ctzll(left), x = fixed[pieces.element[term.piece][i]];
          const int high = (x + 32896) >> 16, rest = x - high * 65536, middle = (rest + 128) >> 8;
          const int bytes[PLANES] = {high, middle, rest - middle * 256};
          for (int plane = 0; plane < PLANES; plane++) {
            query[share][k][i / 4][SHARE * plane + column][i % 4] = (int8_t)bytes[plane];
            sums_of[plane] += bytes[plane];
          }
        }
        for (int plane = 0; plane < PLANES; plane++) lifted[share][k][SHARE * plane + column] = sums_of[plane] * 128;
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
void multiply_keys(const Rows& x, int n, const Pieces& pieces, int rows, IntegerKeys& keys) {
  const bool there = lies_as_tiles<KIND>(x, n);
  for (int k = 0; k < pieces.terms; k++) {
    const int piece = pieces.term[k].piece;
    const int8_t* from = there ? (const int8_t*)x.codes + piece * PIECE : keys.plain[piece][0];
    const int64_t stride = there ? x.stride : PIECE;
    for (int s = 0; s < shares_of(rows); s++) {
#if KVW_LEVEL >= 3
      _tile_loadd(3, keys.query[s][k], 64);
      for (int i = 0; i < 4; i += 2) {
        if (there && k == 0 && s == 0)
          for (int t = 16 * i; t < 16 * i + 32; t++) ask_for(x.codes + (t + BLOCK) * stride, stride);
        _tile_zero(0);
        _tile_loadd(2, from + 16 * i * stride, stride);
        _tile_dpbssd(0, 2, 3);
        _tile_zero(1);
        _tile_loadd(2, from + 16 * (i + 1) * stride, stride);
        _tile_dpbssd(1, 2, 3);
        _tile_stored(0, keys.sums[s][k][i], 64);
        _tile_stored(1, keys.sums[s][k][i + 1], 64);
      }
#else
      const __m512i none = _mm512_setzero_si512();
      const __m512i start =
          Codes<KIND>::SIGNED ? _mm512_sub_epi32(none, _mm512_load_si512(keys.lifted[s][k])) : none;
      for (int t = 0; t < n; t += 8) {
        __m512i acc[8];
        for (int j = 0; j < 8; j++) acc[j] = start;
        for (int i = 0; i < 16; i++) {
          const __m512i query = _mm512_load_si512(keys.query[s][k][i]);
          for (int j = 0; j < 8; j++) {
            int32_t quad;
            memcpy(&quad, from + (t + j) * stride + 4 * i, 4);
            acc[j] = _mm512_dpbusd_epi32(acc[j], _mm512_set1_epi32(quad), query);
          }
        }
        for (int j = 0; j < 8; j++) _mm512_store_si512(keys.sums[s][k][t / 16][t % 16 + j], acc[j]);
      }
#endif
    }
  }
}

// One byte of the fixed point of four queries, for slots J, 4 + J, 8 + J and 12 + J.
template <int J>
inline __m512i four_slots(const int32_t (*sums)[16], int plane) {
  const auto at = [&](int slot) { return _mm_load_si128((const __m128i*)(sums[slot] + SHARE * plane)); };
  __m512i x = _mm512_castsi128_si512(at(J));
  x = _mm512_inserti32x4(x, at(4 + J), 1);
  x = _mm512_inserti32x4(x, at(8 + J), 2);
  return _mm512_inserti32x4(x, at(12 + J), 3);
}

// What term k adds to the products of those slots.
template <int KIND, int J>
inline __m512 of_term(const int32_t (*sums)[16], __m512 scale, __m512 zero, __m512 total, bool moved, __m512 before) {
  const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(four_slots<J>(sums, 0), 8), four_slots<J>(sums, 1));
  const __m512 lower = _mm512_cvtepi32_ps(four_slots<J>(sums, 2));
  const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(256.0f), lower);
  const __m512 y = _mm512_fmadd_ps(whole, _mm512_permute_ps(scale, 0x55 * J), before);
  return KIND == INT4 && moved ? _mm512_fmadd_ps(total, _mm512_permute_ps(zero, 0x55 * J), y) : y;
}

// y[j] holds slots j, 4 + j, 8 + j, 12 + j x 4 rows; row r goes to to[r].
inline void turn(const __m512* y, int rows, const float* unit, float (*to)[BLOCK]) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(y[0], y[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(y[0], y[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(y[2], y[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(y[2], y[3]));
  const __m512d each[SHARE] = {_mm512_unpacklo_pd(a, c), _mm512_unpackhi_pd(a, c), _mm512_unpacklo_pd(b, d),
                               _mm512_unpackhi_pd(b, d)};
  for (int r = 0; r < rows; r++)
    _mm512_storeu_ps(to[r], _mm512_mul_ps(_mm512_castpd_ps(each[r]), _mm512_set1_ps(unit[r])));
}

template <int KIND>
void collect_keys(const Rows& x, int n, const Pieces& pieces, const IntegerKeys& keys, int rows,
                  float (*logits)[BLOCK]) {
  for (int s = 0; s < shares_of(rows); s++) {
    const int share = rows - SHARE * s < SHARE ? rows - SHARE * s : SHARE;
    float unit[SHARE];
    for (int r = 0; r < share; r++) unit[r] = keys.unit[SHARE * s + r] * Codes<KIND>::UNIT;
    for (int t = 0; t < n; t += 16) {
      __m512 y[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
      for (int k = 0; k < pieces.terms; k++) {
        const Pieces::Term& term = pieces.term[k];
        const __m512 scale = _mm512_loadu_ps(x.scales + term.group * BLOCK + t);
        const __m512 zero = KIND == INT4 ? _mm512_loadu_ps(x.zeros + term.group * BLOCK + t) : scale;
        const __m512 total = _mm512_broadcast_f32x4(_mm_load_ps(keys.total[s][term.group]));
        const int32_t(*sums)[16] = keys.sums[s][k][t / 16];
        y[0] = of_term<KIND, 0>(sums, scale, zero, total, term.fresh, y[0]);
        y[1] = of_term<KIND, 1>(sums, scale, zero, total, term.fresh, y[1]);
        y[2] = of_term<KIND, 2>(sums, scale, zero, total, term.fresh, y[2]);
        y[3] = of_term<KIND, 3>(sums, scale, zero, total, term.fresh, y[3]);
      }
      turn(y, share, unit, (float(*)[BLOCK])(logits[SHARE * s] + t));
    }
  }
}

// -- values -----------------------------------------------------------------------------------------------------------

constexpr float FULL_WEIGHT = 16777000.0f;  // what three bytes hold, less what rounding may add

struct IntegerValues {
  alignas(64) int8_t quads[MAX_PIECES][4][16][PIECE];        // 16 bytes of a piece each: (quad of slots, element, slot)
  alignas(64) uint8_t weights[MAX_GROUPS][SHARES][16][PIECE];  // (group, share, byte from the highest on and row, slot)
  alignas(64) Tile sums[MAX_PIECES][4][SHARES];
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
  const int share = share_of(rows);
  for (int g = 0; g < pieces.groups; g++) {
    __m512 scale[4], zero[4];
    for (int i = 0; i < 4; i++) {
      scale[i] = _mm512_loadu_ps(x.scales + g * BLOCK + 16 * i);
      if (KIND == INT4) zero[i] = _mm512_loadu_ps(x.zeros + g * BLOCK + 16 * i);
    }
    // The largest of numbers may be none of them where one is NaN, as it is with values that were NaN; sums are not.
    const __m512 all = _mm512_add_ps(_mm512_add_ps(scale[0], scale[1]), _mm512_add_ps(scale[2], scale[3]));
    const float largest =
        _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q)
            ? NAN
            : _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(scale[0], scale[1]), _mm512_max_ps(scale[2], scale[3])));
    for (int r = 0; r < rows; r++) {
      // Each block has its own unit: a small weight of a long tail must not round to nothing.
      const float top = largest * most[r] <= 1e-30f ? 1e-30f : largest * most[r];
      values.unit[g][r] = top * (Codes<KIND>::UNIT / FULL_WEIGHT);
      const __m512 per = _mm512_set1_ps(FULL_WEIGHT / top);
      uint8_t(*to)[PIECE] = values.weights[g][r / share] + r % share;
      __m512 moved = KIND == INT4 ? _mm512_load_ps(values.moved[r][g]) : _mm512_setzero_ps();
      for (int i = 0; i < 4; i++) {
        const __m512 p = _mm512_loadu_ps(weights[r] + 16 * i);
        if (KIND == INT4) moved = _mm512_fmadd_ps(p, zero[i], moved);
        const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(p, scale[i]), per));
        _mm_store_si128((__m128i*)(to[0] + 16 * i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 16)));
        _mm_store_si128((__m128i*)(to[share] + 16 * i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 8)));
        _mm_store_si128((__m128i*)(to[2 * share] + 16 * i), _mm512_cvtepi32_epi8(fixed));
      }
      if (KIND == INT4) _mm512_store_ps(values.moved[r][g], moved);
    }
  }
}

void multiply_values(const Pieces& pieces, int rows, IntegerValues& values) {
  for (int i = 0; i < shares_of(rows); i++) {
#if KVW_LEVEL >= 3
    int loaded = -1;
#else
    const int used = PLANES * share_of(rows);
#endif
    for (int p = 0; p < pieces.count; p++)
      for (int j = 0; j < 4; j++) {
        const int group = pieces.group[p][j];
        if (group < 0) continue;
#if KVW_LEVEL >= 3
        if (loaded != group) _tile_loadd(6, values.weights[group][i], PIECE);
        loaded = group;
        _tile_loadd(7, values.quads[p][j], PIECE);
        if (j % 2 == 0) {
          _tile_zero(4);
          _tile_dpbusd(4, 6, 7);
          _tile_stored(4, values.sums[p][j][i], 64);
        } else {
          _tile_zero(5);
          _tile_dpbusd(5, 6, 7);
          _tile_stored(5, values.sums[p][j][i], 64);
        }
#else
        for (int r = 0; r < used; r += PLANES) {
          __m512i acc[PLANES];
          for (int k = 0; k < PLANES; k++) acc[k] = _mm512_setzero_si512();
          for (int quad = 0; quad < 16; quad++) {
            const __m512i v = _mm512_load_si512(values.quads[p][j][quad]);
            for (int k = 0; k < PLANES; k++) {
              int32_t w;
              memcpy(&w, values.weights[group][i][r + k] + 4 * quad, 4);
              acc[k] = _mm512_dpbusd_epi32(acc[k], _mm512_set1_epi32(w), v);
            }
          }
          for (int k = 0; k < PLANES; k++) _mm512_store_si512(values.sums[p][j][i][r + k], acc[k]);
        }
#endif
      }
  }
}

void collect_values(const Pieces& pieces, int rows, IntegerValues& values) {
  const int share = share_of(rows);
  for (int p = 0; p < pieces.count; p++)
    for (int j = 0; j < 4; j++) {
      const int group = pieces.group[p][j];
      if (group < 0) continue;
      for (int r = 0; r < rows; r++) {
        const int32_t(*sums)[16] = values.sums[p][j][r / share] + r % share;
        const __m512i high = _mm512_load_si512(sums[0]), middle = _mm512_load_si512(sums[share]);
        const __m512 upper = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), middle));
        const __m512 lower = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * share]));
        const __m512 whole = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
        float* to = values.mixed[r][p][j];
        _mm512_store_ps(to, _mm512_fmadd_ps(whole, _mm512_set1_ps(values.unit[group][r]), _mm512_load_ps(to)));
      }
    }
}

}  // namespace
}  // namespace KVW_NS

#endif
